// The symbolic phase of a product of two CSR matrices: integers alone, free of torch and CUDA, row by row, so that the
// caller can give parts of the rows to threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
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

  // Columns of row i of the product, in order. Valid until the next call. Rows of a that follow each other and have the
  // same columns, as those of a max-pooling's window do, are worked out once.
  const std::vector<I>& columns(int64_t i) {
    const auto row = [&](int64_t r) { return std::pair(a_.col + a_.crow[r], a_.col + a_.crow[r + 1]); };
    const auto [begin, end] = row(i);
    if (last_ >= 0) {
      const auto [last_begin, last_end] = row(last_);
      if (std::equal(begin, end, last_begin, last_end)) return found_;
    }
    last_ = i;
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
  int64_t last_ = -1;          // the row that found_ is of
  std::vector<int64_t> seen_;  // the last row that had this column
  std::vector<I> found_;
};

// Columns of rows of a product, from where they are counted to where they have their place: as many rows as take that
// many bytes; the others are worked out again. Threads may keep rows at the same time, each others'.
template <typename I>
class KeptColumns {
 public:
  KeptColumns(int64_t rows, int64_t most_bytes) : rows_(rows), room_(most_bytes / int64_t(sizeof(I))) {}

  void keep(int64_t row, const std::vector<I>& columns) {
    const auto count = int64_t(columns.size());
    if (room_.fetch_sub(count) >= count)
      rows_[row] = columns;
    else
      room_.fetch_add(count);
  }
  // Those of a row of so many; null if there was no room.
  const std::vector<I>* find(int64_t row, int64_t count) const {
    return int64_t(rows_[row].size()) == count ? &rows_[row] : nullptr;
  }

 private:
  std::vector<std::vector<I>> rows_;
  std::atomic<int64_t> room_;
};

// How the numeric phase computes a row of the product: see csr_matmul.h.
enum class RowKind : uint8_t { kEmpty, kAxpy, kGather, kAccumulate, kExpand };

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

// Pieces of a product whose scalar products a block of a GPU writes into its shared memory, those of an element side by
// side, before it sums them: elements of the product that follow each other, of one row or of several short ones.
constexpr int kPlaceBits = 11;
constexpr int64_t kPieceProducts = 1 << kPlaceBits;  // that a block has room for
constexpr int64_t kPieceSegments = 512;              // the same of segments: what one element of a brings to a piece
constexpr int64_t kSmallPiece = 256;                 // products; a piece of fewer takes the next row, too
constexpr int kPieceNumbers = 6;                     // what is said of a piece
constexpr int kBaseOf = 32;                          // products whose segments are counted from the first one's
static_assert(kBaseOf <= 1 << (16 - kPlaceBits), "a word has a place and a count of segments");

// Of piece p, pieces[kPieceNumbers p] on says where its elements, its segments and its list begin, and how many
// segments, elements and products it has. Pieces that are alike share a list. Segment s multiplies element left[s] of a
// by elements of b: product q of the piece is with right[s] + q. A list, of unsigned words: the segment of every
// kBaseOf-th product; where each element's products begin, counted in the order in which they are summed, and where the
// last one's end; and of each product, in the order of segments, its place in that order, and above kPlaceBits how many
// segments it is after the last one that was said. An element's products are in the order of a's elements.
template <typename I>
struct Expansion {
  std::vector<I> pieces, left, right;
  std::vector<int16_t> lists;

  int64_t bytes() const {
    return int64_t(sizeof(I) * (pieces.size() + left.size() + right.size()) + sizeof(int16_t) * lists.size());
  }
};

// Which rows a GPU expands, beside what choose_kinds has chosen: all but those that have too many products an element
// for a list, and sums of whole rows, where these are most of the product. None where that spares no row from being
// found again: lists that are read once are as fast, and their plan is there.
inline std::vector<RowKind> choose_expanded(const std::vector<RowCount>& rows, std::vector<RowKind> kinds) {
  int64_t all = 0, axpy = 0;
  bool spares = false;
  const auto listable = [&](size_t i) { return rows[i].products <= kLongestList * rows[i].elements; };
  for (size_t i = 0; i < rows.size(); ++i) {
    all += rows[i].products, axpy += kinds[i] == RowKind::kAxpy ? rows[i].products : 0;
    spares = spares || (kinds[i] == RowKind::kAccumulate && listable(i));
  }
  if (!spares) return kinds;
  for (size_t i = 0; i < rows.size(); ++i) {
    const bool taken = kinds[i] == RowKind::kAxpy ? 2 * axpy < all : kinds[i] != RowKind::kEmpty;
    if (taken && listable(i)) kinds[i] = RowKind::kExpand;
  }
  return kinds;
}

// Rows of b of few columns, for a GPU that reads a's elements in order and gives each column a lane: it wants to know
// of a row of b where it begins and which columns it has. Worthwhile where an element of a brings several products, and
// rows of a have several elements.
constexpr int64_t kNarrow = 32, kNarrowProducts = 4, kNarrowElements = 8;
constexpr bool worth_narrow(int64_t columns, int64_t products, int64_t a_elements, int64_t elements) {
  return products > 0 && columns <= kNarrow && products >= kNarrowProducts * a_elements &&
         products >= kNarrowElements * elements;
}

// (rows of b, 2): the first element, and a bit for each column.
template <typename I>
std::vector<I> list_narrow(const Csr<I>& b) {
  std::vector<I> made;
  made.reserve(2 * b.rows);
  for (int64_t j = 0; j < b.rows; ++j) {
    uint32_t bits = 0;
    for (I f = b.crow[j]; f < b.crow[j + 1]; ++f) bits |= uint32_t(1) << b.col[f];
    made.push_back(b.crow[j]), made.push_back(I(bits));
  }
  return made;
}

// Works out pieces, one after the other.
template <typename I>
class Expander {
 public:
  Expander(const Csr<I>& a, const Csr<I>& b, const Csr<I>& c, Expansion<I>& made)
      : a_(a), b_(b), c_(c), made_(made), place_(b.columns) {}

  // Rows in order; those with an element of more products than a piece takes accumulate. False, and nothing of use,
  // where it would take more than `budget` bytes.
  bool expand(std::vector<RowKind>& kinds, const std::vector<RowCount>& counts, int64_t budget) {
    for (int64_t i = 0; i < a_.rows; ++i) {
      if (kinds[i] == RowKind::kEmpty) continue;
      const int64_t stored = a_.crow[i + 1] - a_.crow[i];
      const bool whole = counts[i].products <= kPieceProducts && stored <= kPieceSegments;
      if (products_ > 0 && (kinds[i] != RowKind::kExpand || products_ >= kSmallPiece || !whole ||
                            products_ + counts[i].products > kPieceProducts || segments() + stored > kPieceSegments)) {
        close();
      }
      if (kinds[i] != RowKind::kExpand) continue;
      if (whole) {
        add(i, c_.crow[i], c_.crow[i + 1]);
      } else if (!cut(i, counts[i].products)) {
        kinds[i] = RowKind::kAccumulate;
      }
      if (made_.bytes() > budget || !numbered()) return false;
    }
    if (products_ > 0) close();
    return made_.bytes() <= budget && numbered();
  }

 private:
  struct Known {
    int64_t where, segment, segments, elements;
  };

  int64_t segments() const { return int64_t(made_.left.size()) - first_segment_; }
  bool numbered() const {
    const size_t most = size_t(std::numeric_limits<I>::max());
    return made_.left.size() <= most && made_.lists.size() <= most;
  }

  // A row of more products than fit: as many pieces as it takes, of about as many products each. False where an
  // element's own do not fit.
  bool cut(int64_t i, int64_t products) {
    const I begin = c_.crow[i], end = c_.crow[i + 1];
    for (I e = begin; e < end; ++e) place_[c_.col[e]] = 0;
    for (I e = a_.crow[i]; e < a_.crow[i + 1]; ++e) {
      for (I f = b_.crow[a_.col[e]]; f < b_.crow[a_.col[e] + 1]; ++f) ++place_[b_.col[f]];
    }
    // Each segment has a product, and brings an element one at most.
    const int64_t stored = a_.crow[i + 1] - a_.crow[i];
    const int64_t most = stored > kPieceSegments ? kPieceSegments : kPieceProducts;
    const int64_t parts = (products + most - 1) / most, wanted = (products + parts - 1) / parts;
    std::vector<I> cuts = {begin};
    int64_t taken = 0;
    for (I e = begin; e < end; ++e) {
      const int64_t own = place_[c_.col[e]];
      if (own > most) return false;
      if (taken > 0 && taken + own > most) cuts.push_back(e), taken = 0;
      taken += own;
      if (taken >= wanted && e + 1 < end) cuts.push_back(e + 1), taken = 0;
    }
    cuts.push_back(end);
    for (size_t k = 0; k + 1 < cuts.size(); ++k) add(i, cuts[k], cuts[k + 1]), close();
    return true;
  }

  // Elements [begin, end) of the product, of row i, to the piece that is open.
  void add(int64_t i, I begin, I end) {
    if (products_ == 0) first_element_ = begin, first_segment_ = int64_t(made_.left.size()), hash_ = 0;
    const I low = c_.col[begin], high = c_.col[end - 1];
    const bool all = begin == c_.crow[i] && end == c_.crow[i + 1];
    const auto put = [&](uint64_t number) {
      hash_ = (hash_ ^ number) * 0x9e3779b97f4a7c15u;
      hash_ ^= hash_ >> 29;
    };
    for (I e = a_.crow[i]; e < a_.crow[i + 1]; ++e) {
      const I *from = b_.col + b_.crow[a_.col[e]], *to = b_.col + b_.crow[a_.col[e] + 1];
      if (!all) from = std::lower_bound(from, to, low), to = std::upper_bound(from, to, high);
      if (from == to) continue;
      made_.left.push_back(e), made_.right.push_back(I(from - b_.col - products_));
      rows_.push_back({low, I(begin - first_element_), int64_t(to - from)});
      put(uint64_t(begin - first_element_)), put(uint64_t(to - from));
      for (const I* f = from; f < to; ++f) put(uint64_t(*f - low));
      products_ += to - from;
    }
    parts_.push_back({begin, end});
  }

  // A list for the piece that is open: of one that is alike, or its own.
  void close() {
    const int64_t n = segments(), elements = parts_.back().second - first_element_;
    const Known* found = nullptr;
    const auto [begin, end] = known_.equal_range(hash_);
    for (auto it = begin; it != end && !found; ++it) {
      if (it->second.segments == n && it->second.elements == elements && alike(it->second.segment)) found = &it->second;
    }
    if (!found) {
      const Known own{int64_t(made_.lists.size()), first_segment_, n, elements};
      list(n, elements);
      found = &known_.emplace(hash_, own)->second;
    }
    for (const int64_t number : {int64_t(first_element_), first_segment_, found->where, n, elements, products_}) {
      made_.pieces.push_back(I(number));
    }
    products_ = 0, parts_.clear();
  }

  // Whether the open piece's segments join as those from `other` on do: the same columns, counted from the first of
  // their row, so that they belong to the same elements.
  bool alike(int64_t other) const {
    int64_t before = 0, before_other = 0;
    for (int64_t s = first_segment_; s < first_segment_ + segments(); ++s, ++other) {
      const Segment &own = rows_[s], &its = rows_[other];
      if (own.size != its.size || own.element != its.element) return false;
      const I *f = b_.col + made_.right[s] + before, *g = b_.col + made_.right[other] + before_other;
      for (int64_t q = 0; q < own.size; ++q) {
        if (f[q] - own.low != g[q] - its.low) return false;
      }
      before += own.size, before_other += its.size;
    }
    return true;
  }

  void list(int64_t n, int64_t elements) {
    const size_t at = made_.lists.size();
    const int64_t bases_count = (products_ + kBaseOf - 1) / kBaseOf;
    made_.lists.resize(at + bases_count + elements + 1 + products_, 0);
    int16_t *bases = made_.lists.data() + at, *starts = bases + bases_count, *words = starts + elements + 1;
    // An element's number by its column: of one row at a time.
    std::vector<int16_t> next(elements + 1, 0), element_of(products_);
    int64_t q = 0, s = 0;
    for (const auto& [begin, end] : parts_) {
      for (I e = begin; e < end; ++e) place_[c_.col[e]] = I(e - first_element_);
      for (; s < n && rows_[first_segment_ + s].element == begin - first_element_; ++s) {
        const I* f = b_.col + made_.right[first_segment_ + s] + q;
        for (int64_t k = 0; k < rows_[first_segment_ + s].size; ++k, ++q) {
          if (q % kBaseOf == 0) bases[q / kBaseOf] = int16_t(s);
          words[q] = int16_t((s - bases[q / kBaseOf]) << kPlaceBits);
          element_of[q] = int16_t(place_[f[k]]);
          ++next[element_of[q] + 1];
        }
      }
    }
    for (int64_t e = 0; e < elements; ++e) next[e + 1] = int16_t(next[e + 1] + next[e]);
    std::copy(next.begin(), next.end(), starts);
    for (q = 0; q < products_; ++q) words[q] = int16_t(words[q] | next[element_of[q]]++);
  }

  struct Segment {
    I low;      // the first column of its row in the piece
    I element;  // that row's first element of the piece
    int64_t size;
  };

  Csr<I> a_, b_, c_;
  Expansion<I>& made_;
  std::vector<I> place_;                // a number per column, of any value
  std::vector<Segment> rows_;           // of every segment
  std::vector<std::pair<I, I>> parts_;  // of the open piece: elements of one row each
  int64_t products_ = 0, first_segment_ = 0;
  I first_element_ = 0;
  uint64_t hash_ = 0;
  std::unordered_multimap<uint64_t, Known> known_;
};

}  // namespace weft::sparse
