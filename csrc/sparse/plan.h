// The symbolic phase of a product of two CSR matrices: integers alone, free of torch and CUDA, row by row, so that the
// caller can give parts of the rows to threads.
#pragma once
#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace weft::sparse {

template <typename I>
struct Csr {
  const I *crow, *col;
  int64_t rows, columns;  // columns: at least one more than the last that has an element
};

// Scalar products in row i of a * b.
template <typename I>
int64_t count_products(const Csr<I>& a, const Csr<I>& b, int64_t i) {
  int64_t count = 0;
  for (I e = a.crow[i]; e < a.crow[i + 1]; ++e) count += b.crow[a.col[e] + 1] - b.crow[a.col[e]];
  return count;
}

// Works out rows of a product; one per thread.
template <typename I>
class Symbolic {
 public:
  Symbolic(const Csr<I>& a, const Csr<I>& b) : a_(a), b_(b), seen_(b.columns, -1) {}

  // Columns of row i of the product, in order. Valid until the next call.
  const std::vector<I>& columns(int64_t i) {
    found_.clear();
    for (I e = a_.crow[i]; e < a_.crow[i + 1]; ++e) {
      const I j = a_.col[e];
      for (I f = b_.crow[j]; f < b_.crow[j + 1]; ++f) {
        const I k = b_.col[f];
        if (seen_[k] == i) continue;
        seen_[k] = i;
        found_.push_back(k);
      }
    }
    // Sorting costs n log n; a row that fills much of its span is read off the marks.
    if (!std::is_sorted(found_.begin(), found_.end())) {
      const auto [low, high] = std::minmax_element(found_.begin(), found_.end());
      const I first = *low, last = *high;
      if (int64_t(last) - first < 8 * int64_t(found_.size())) {
        found_.clear();
        for (I k = first; k <= last; ++k) {
          if (seen_[k] == i) found_.push_back(k);
        }
      } else {
        std::sort(found_.begin(), found_.end());
      }
    }
    return found_;
  }

 private:
  Csr<I> a_, b_;
  std::vector<int64_t> seen_;  // the last row that had this column
  std::vector<I> found_;
};

// How the numeric phase computes a row of the product: see csr_matmul.h.
enum class RowKind : uint8_t { kEmpty, kAxpy, kGather, kAccumulate };

// A row shorter than this is gathered rather than a sum of rows, where there is memory: a warp, or a vector, would be
// idle.
constexpr int64_t kShort = 16;
// Products of an element beyond which a list costs more reads than finding them again.
constexpr int64_t kLongestList = 32;

struct RowCount {
  int64_t products, elements;
  bool axpy;  // each row of b that has a part in it has all of its columns
};

template <typename I>
RowCount count_row(const Csr<I>& a, const Csr<I>& b, int64_t i, int64_t elements) {
  RowCount row{0, elements, true};
  for (I e = a.crow[i]; e < a.crow[i + 1]; ++e) {
    const int64_t length = b.crow[a.col[e] + 1] - b.crow[a.col[e]];
    row.products += length;
    row.axpy = row.axpy && length == elements;
  }
  return row;
}

// A kind for every row, whose lists take at most `budget` indices: rows with the fewest products per element first.
inline std::vector<RowKind> choose_kinds(const std::vector<RowCount>& rows, int64_t budget) {
  auto listable = [](const RowCount& row, int64_t longest) {
    return row.elements > 0 && !(row.axpy && row.elements >= kShort) && row.products <= longest * row.elements;
  };
  int64_t longest = kLongestList;
  for (; longest > 0; longest /= 2) {
    int64_t indices = 0;
    for (const RowCount& row : rows) {
      if (listable(row, longest)) indices += 2 * (row.products + row.elements);
    }
    if (indices <= budget) break;
  }
  std::vector<RowKind> kinds(rows.size(), RowKind::kEmpty);
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].elements == 0) continue;
    kinds[i] = longest > 0 && listable(rows[i], longest) ? RowKind::kGather
               : rows[i].axpy                            ? RowKind::kAxpy
                                                         : RowKind::kAccumulate;
  }
  return kinds;
}

// The products of row i by element of the product c: those of its t-th element are starts[t] <= s < starts[t + 1], of
// elements left[s] of a and right[s] of b, in order of left; starts[0] = first. `place` has a number per column, of any
// value.
template <typename I>
void list_products(const Csr<I>& a, const Csr<I>& b, const Csr<I>& c, int64_t i, std::vector<I>& place, I* starts,
                   I* left, I* right, I first) {
  const I begin = c.crow[i], end = c.crow[i + 1];
  for (I e = begin; e < end; ++e) place[c.col[e]] = 0;
  for (I e = a.crow[i]; e < a.crow[i + 1]; ++e) {
    for (I f = b.crow[a.col[e]]; f < b.crow[a.col[e] + 1]; ++f) ++place[b.col[f]];
  }
  for (I e = begin; e < end; ++e) {
    *starts++ = first;
    first += std::exchange(place[c.col[e]], first);
  }
  for (I e = a.crow[i]; e < a.crow[i + 1]; ++e) {
    for (I f = b.crow[a.col[e]]; f < b.crow[a.col[e] + 1]; ++f) {
      const I s = place[b.col[f]]++;
      left[s] = e;
      right[s] = f;
    }
  }
}

// The rows that are gathered, in all.
struct GatherTotals {
  int64_t rows, elements, products, longest;  // longest: elements of a row
};

// Whether rows may share their lists: enough of them to fill the threads, long enough that where each begins may be
// looked up, and none so long that others wait for it.
//
// A core takes row after row, and whatever is shared stays in its L1. A GPU's threads take all rows at once: a list of
// an element's own comes in order and waits for nothing, where a shared one waits for what its row has to say, which is
// then in each product's chain of loads, list, number, result. That pays by the bytes it saves: two indices a product
// and one an element, where several products make an element. Where one does, its own list is one index, a third of the
// bytes or less. And where right is counted from b's rows (of_rows), each product waits for two loads more, a's column
// and where b's row begins, which costs more than the bytes.
constexpr int64_t kManyRows = 32, kLongEnough = 64, kAlike = 8;
constexpr bool worth_sharing(const GatherTotals& all, bool of_rows, bool gpu) {
  if (gpu && (of_rows || all.products == all.elements)) return false;
  return all.rows >= kManyRows && all.elements >= kLongEnough * all.rows &&
         all.longest * all.rows <= kAlike * all.elements;
}

// Lists that many rows share, as rows of a Jacobian of sliding windows do. Row r of the gathered ones has `elements` of
// them: its t-th is the sum over starts[where[r] + t] <= s < starts[where[r] + t + 1] of element left[s] of its row of
// a times element right[s] of b, which is counted from base[r], or from the first of the row of b that belongs to
// left[s]. Where every element has one product: empty starts, s = where[r] + t; and where that is element t of the row
// of a: empty left.
template <typename I>
struct SharedLists {
  std::vector<I> where, base, starts, left, right;
};

// Finds the lists that are alike in those of list_products: the rows follow each other in `starts`. False,
// and nothing of use, where they would take more than `budget` indices.
template <typename I>
bool share_lists(const Csr<I>& a, const Csr<I>& b, const Csr<I>& c, const std::vector<int64_t>& rows, const I* starts,
                 const I* left, const I* right, bool of_rows, int64_t budget, SharedLists<I>& made) {
  struct Known {
    int64_t where, elements, first, products;
  };
  std::unordered_multimap<uint64_t, Known> known;
  std::vector<I> own[3];  // starts, left, right of a row, counted from its own beginnings
  made = {};
  bool single = true, in_order = true;
  const int64_t per_row = of_rows ? 1 : 2;
  for (const int64_t i : rows) {
    const int64_t elements = c.crow[i + 1] - c.crow[i];
    if (elements == 0) {
      made.where.push_back(0);
      if (!of_rows) made.base.push_back(0);
      continue;
    }
    const I from = starts[0], products = starts[elements] - from, base = right[from];
    for (auto& numbers : own) numbers.clear();
    uint64_t hash = uint64_t(elements);
    const auto put = [&](int kind, I number) {
      own[kind].push_back(number);
      hash = (hash ^ uint64_t(number)) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 29;
    };
    for (int64_t t = 0; t < elements; ++t) put(0, starts[t] - from);
    for (I s = from; s < from + products; ++s) {
      put(1, left[s] - a.crow[i]);
      put(2, right[s] - (of_rows ? b.crow[a.col[left[s]]] : base));
    }
    starts += elements;
    const Known* found = nullptr;
    const auto [begin, end] = known.equal_range(hash);
    for (auto it = begin; it != end && !found; ++it) {
      const Known& k = it->second;
      const auto same = [](const std::vector<I>& numbers, auto from, I less) {
        return std::equal(numbers.begin(), numbers.end(), from, [&](I x, I y) { return x == y - less; });
      };
      if (k.elements == elements && k.products == products && same(own[0], made.starts.begin() + k.where, I(k.first)) &&
          same(own[1], made.left.begin() + k.first, 0) && same(own[2], made.right.begin() + k.first, 0)) {
        found = &k;
      }
    }
    if (!found) {
      const Known k{int64_t(made.starts.size()), elements, int64_t(made.left.size()), products};
      for (const I number : own[0]) made.starts.push_back(I(k.first) + number);
      made.starts.push_back(I(k.first + products));
      made.left.insert(made.left.end(), own[1].begin(), own[1].end());
      made.right.insert(made.right.end(), own[2].begin(), own[2].end());
      single = single && products == elements;
      for (int64_t t = 0; in_order && t < products; ++t) in_order = own[1][t] == t;
      found = &known.emplace(hash, k)->second;
    }
    made.where.push_back(I(found->where));
    if (!of_rows) made.base.push_back(base);
    if (int64_t(made.starts.size() + 2 * made.left.size()) + per_row * int64_t(rows.size()) > budget) return false;
  }
  if (single) {
    // One start more than products for each list.
    std::vector<I> lists_before(made.starts.size());
    for (const auto& entry : known) lists_before[entry.second.where] = I(entry.second.first);
    for (I& where : made.where) where = lists_before.empty() ? 0 : lists_before[where];
    made.starts.clear();
    if (in_order) made.left.clear();
  }
  return true;
}

}  // namespace weft::sparse
