// The CPU kernels of weft::rnn: included once per instruction set, with the macros of common/cpu/simd-inl.h, whose rule
// on the standard library's templates holds here, too.
#include "common/cpu/simd-inl.h"
#include "rnn/cells/cell-inl.h"
#include "rnn/persistent/cpu/rnn_kernels.h"

namespace weft::rnn::WEFT_ISA {
namespace {

using namespace weft::cpu::WEFT_ISA;

// ---- The register block

// A block with few accumulators waits for the latency of each multiply-add: it sums in as many chains as make up eight.
constexpr int chains(int mr, int nv) {
  return mr * nv >= 8 ? 1 : mr * nv >= 4 ? 2 : 4;
}

// start(r, v) + the sum over k < depth of left[r * left_stride + k * STEP] w[k][v], handed to finish(r, v, sum).
template <typename T, int MR, int NV, int STEP = 1, typename Start, typename Finish>
WEFT_INLINE void block_product(const T* left, int64_t left_stride, int64_t depth, const T* w, Start start,
                               Finish finish) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  constexpr int kChains = chains(MR, NV);
  Vec acc[kChains][MR][NV];
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      acc[0][r][v] = start(r, v);
#pragma GCC unroll 4
      for (int c = 1; c < kChains; ++c) acc[c][r][v] = Vec{};
    }
  }
  int64_t k = 0;
  if constexpr (kChains > 1) {
    for (; k + kChains <= depth; k += kChains, w += kChains * NV * S::kLanes) {
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) {
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
          const Vec x = S::broadcast(left[r * left_stride + (k + c) * STEP]);
#pragma GCC unroll 8
          for (int v = 0; v < NV; ++v) acc[c][r][v] += x * S::load(w + (c * NV + v) * S::kLanes);
        }
      }
    }
  }
  for (; k < depth; ++k, w += NV * S::kLanes) {
    Vec weight[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) weight[v] = S::load(w + v * S::kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
      const Vec x = S::broadcast(left[r * left_stride + k * STEP]);
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) acc[0][r][v] += x * weight[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
#pragma GCC unroll 4
      for (int c = 1; c < kChains; ++c) acc[0][r][v] += acc[c][r][v];
      finish(r, v, acc[0][r][v]);
    }
  }
}

// Calls f.template operator()<panels>(first_panel) for groups of panels of equal size, BLOCKS vectors for each panel
// and at most three where there is a choice.
template <int BLOCKS, typename F>
WEFT_INLINE void slice_groups(int64_t p0, int64_t p1, F f) {
  if constexpr (BLOCKS > 1) {
    for (int64_t p = p0; p < p1; ++p) f.template operator()<1>(p);
  } else {
    const int64_t groups = ceil_div(p1 - p0, 3);
    for (int64_t i = 0; i < groups; ++i) {
      const Range panels = split(p1 - p0, groups, i);
      const int64_t first = p0 + panels.begin;
      switch (panels.end - panels.begin) {
        case 1:
          f.template operator()<1>(first);
          break;
        case 2:
          f.template operator()<2>(first);
          break;
        default:
          f.template operator()<3>(first);
      }
    }
  }
}

// ---- Packing

// Vectors of 16 bytes, which every instruction set has, and square tiles of them.
template <typename T>
struct Tile;
template <>
struct Tile<float> {
  static constexpr int kSize = 4;
  typedef float Row __attribute__((vector_size(16), aligned(4), may_alias));
};
template <>
struct Tile<double> {
  static constexpr int kSize = 2;
  typedef double Row __attribute__((vector_size(16), aligned(8), may_alias));
};

// to[i][j] = from[j][i]
template <typename T>
WEFT_INLINE void transpose_tile(const T* from, int64_t from_stride, T* to, int64_t to_stride) {
  using Row = typename Tile<T>::Row;
  auto in = [&](int i) { return *reinterpret_cast<const Row*>(from + i * from_stride); };
  auto out = [&](int i) -> Row& { return *reinterpret_cast<Row*>(to + i * to_stride); };
  const Row a = in(0), b = in(1);
  if constexpr (Tile<T>::kSize == 2) {
    out(0) = Row{a[0], b[0]};
    out(1) = Row{a[1], b[1]};
  } else {
    const Row c = in(2), d = in(3);
    const Row ab_low{a[0], b[0], a[1], b[1]}, ab_high{a[2], b[2], a[3], b[3]}, cd_low{c[0], d[0], c[1], d[1]},
        cd_high{c[2], d[2], c[3], d[3]};
    out(0) = Row{ab_low[0], ab_low[1], cd_low[0], cd_low[1]};
    out(1) = Row{ab_low[2], ab_low[3], cd_low[2], cd_low[3]};
    out(2) = Row{ab_high[0], ab_high[1], cd_high[0], cd_high[1]};
    out(3) = Row{ab_high[2], ab_high[3], cd_high[2], cd_high[3]};
  }
}

template <typename T>
int64_t packed_size(const PackArgs<T>& a) {
  return panels_of<T>(a.columns) * a.blocks * a.depth * Simd<T>::kLanes;
}

template <typename T, int BLOCKS>
void pack(const PackArgs<T>& a, int member, int members) {
  constexpr int kLanes = Simd<T>::kLanes;
  int64_t unit = 0;
  T* packed = a.packed;
  for (int s = 0; s < a.slices; ++s) {
    const Range slice = split(panels_of<T>(a.columns), a.slices, s);
    for (int64_t k0 = 0; k0 < a.depth; k0 += a.depth_block) {
      const int64_t k1 = smaller(k0 + a.depth_block, a.depth);
      slice_groups<BLOCKS>(slice.begin, slice.end, [&]<int NP>(int64_t panel) {
        constexpr int NV = NP * BLOCKS;
        T* const group = packed;
        packed += (k1 - k0) * NV * kLanes;
        if (unit++ % members != member) return;
        if (a.column_stride == 1) {
          for (int64_t k = k0; k < k1; ++k) {
            const int64_t turned = k + a.rotate < a.depth ? k + a.rotate : k + a.rotate - a.depth;
            const int64_t from = turned / a.run * a.run_apart + turned % a.run;
            for (int v = 0; v < NV; ++v) {
              const int64_t column = (panel + v / BLOCKS) * kLanes;
              const T* const row = a.data + from * a.depth_stride + (v % BLOCKS) * a.apart + column;
              Simd<T>::store(group + ((k - k0) * NV + v) * kLanes, Simd<T>::load(row, a.columns - column));
            }
          }
          return;
        }
        // A transposition: short runs along k keep both sides in L1.
        constexpr int64_t kRun = 16;
        constexpr int kTile = Tile<T>::kSize;
        for (int64_t run = k0; run < k1; run += kRun) {
          const int64_t count = smaller(kRun, k1 - run), tiled = count / kTile * kTile;
          for (int v = 0; v < NV; ++v) {
            for (int lane = 0; lane < kLanes; lane += kTile) {
              const int64_t column = (panel + v / BLOCKS) * kLanes + lane;
              const T* const from = a.data + run + ((v % BLOCKS) * a.apart + column) * a.column_stride;
              T* const to = group + ((run - k0) * NV + v) * kLanes + lane;
              int64_t k = 0;
              if (column + kTile <= a.columns) {
                for (; k < tiled; k += kTile) {
                  transpose_tile(from + k, a.column_stride, to + k * NV * kLanes, NV * kLanes);
                }
              }
              for (; k < count; ++k) {
                for (int i = 0; i < kTile; ++i) {
                  to[k * NV * kLanes + i] = column + i < a.columns ? from[k + i * a.column_stride] : T(0);
                }
              }
            }
          }
        }
      });
    }
  }
}

template <typename T>
void pack(const PackArgs<T>& a, int member, int members) {
  switch (a.blocks) {
    case 1:
      return pack<T, 1>(a, member, members);
    case 3:
      return pack<T, 3>(a, member, members);
    default:
      return pack<T, 4>(a, member, members);
  }
}

// ---- Products over all steps

// Rows of a product that are taken through all of its columns at a time: they and a group's weights share L2.
constexpr int64_t kRowBlock = 128;

template <typename T>
void multiply(const MultiplyArgs<T>& a, int64_t row0, int64_t row1) {
  using S = Simd<T>;
  const int64_t panels = panels_of<T>(a.columns);
  for (int64_t first = row0; first < row1; first += kRowBlock) {
    const int64_t rows = smaller(kRowBlock, row1 - first);
    for (int64_t k0 = 0; k0 < a.depth; k0 += a.depth_block) {
      const int64_t depth = smaller(a.depth_block, a.depth - k0);
      const bool add = a.add || k0 > 0;
      slice_groups<1>(0, panels, [&]<int NP>(int64_t panel) {
        const T* const w = a.packed + (k0 * panels + panel * depth) * S::kLanes;
        const int64_t columns = a.columns - panel * S::kLanes;
        row_blocks<max_rows(NP)>(rows, [&]<int MR>(int64_t r0) {
          T* const out = a.out + (first + r0) * a.columns + panel * S::kLanes;
          auto start = [&](int r, int v) {
            return add ? S::load(out + r * a.columns + v * S::kLanes, columns - v * S::kLanes) : typename S::Vec{};
          };
          auto finish = [&](int r, int v, typename S::Vec sum) {
            S::store(out + r * a.columns + v * S::kLanes, sum, columns - v * S::kLanes);
          };
          block_product<T, MR, NP>(a.left + (first + r0) * a.left_stride + k0, a.left_stride, depth, w, start, finish);
        });
      });
    }
  }
}

// Both operands are packed, a block of rows at a time, because the sum runs over their rows: `right` in panels for up
// to kRightPanels at once, `left` in strips of kStrip columns, which is a cache line.
constexpr int64_t kSumRows = 256, kRightPanels = 24, kStrip = 16;

template <typename T>
int64_t transposed_scratch() {
  return kSumRows * (kRightPanels * Simd<T>::kLanes + kStrip);
}

template <typename T>
void transposed(const TransposedArgs<T>& a, int task, int tasks, T* scratch) {
  using S = Simd<T>;
  constexpr int kLanes = S::kLanes;
  // The columns of left that wrap around under `rotate` go apart, and so do those of each run where they lie apart, so
  // that a strip's rows of out are contiguous.
  const bool runs = a.run < a.run_apart;
  const int64_t wrapped = a.M - a.rotate, strips0 = ceil_div(wrapped, kStrip), of_run = ceil_div(a.run, kStrip),
                strips = runs ? a.M / a.run * of_run : strips0 + ceil_div(a.M - wrapped, kStrip);
  struct Strip {
    int64_t column, count, to_row;
  };
  const auto strip_at = [&](int64_t strip) -> Strip {
    if (runs) {
      const int64_t run = strip / of_run, first = strip % of_run * kStrip;
      const int64_t turned = (run + a.rotate / a.run) % (a.M / a.run);
      return {run * a.run + first, smaller(kStrip, a.run - first), turned * a.run_apart + first};
    }
    const bool second = strip >= strips0;
    const int64_t column = second ? wrapped + (strip - strips0) * kStrip : strip * kStrip;
    return {column, smaller(kStrip, (second ? a.M : wrapped) - column), second ? column - wrapped : column + a.rotate};
  };
  const int64_t panels = a.out == nullptr ? 0 : panels_of<T>(a.N);
  const int64_t along_m = smaller(tasks, strips), along_n = smaller(tasks / along_m, panels > 1 ? panels : 1);
  if (task >= along_m * along_n) return;
  const Range mine = split(strips, along_m, task / along_n);
  const Range my_panels = split(panels, along_n, task % along_n);
  const bool sum = a.sums != nullptr && task % along_n == 0;
  T* const right = scratch;
  T* const left = scratch + kSumRows * kRightPanels * kLanes;

  int64_t p0 = my_panels.begin;
  do {
    const int64_t p1 = smaller(p0 + kRightPanels, my_panels.end);
    for (int64_t k0 = 0; k0 < a.rows; k0 += kSumRows) {
      const int64_t rows = smaller(kSumRows, a.rows - k0);
      slice_groups<1>(p0, p1, [&]<int NP>(int64_t panel) {
        T* to = right + (panel - p0) * rows * kLanes;
        for (int64_t k = 0; k < rows; ++k) {
          const T* const row = a.right_rows != nullptr ? a.right_rows[k0 + k] : a.right + (k0 + k) * a.right_stride;
          for (int p = 0; p < NP; ++p, to += kLanes) {
            const int64_t column = (panel + p) * kLanes;
            S::store(to, row != nullptr ? S::load(row + column, a.N - column) : typename S::Vec{});
          }
        }
      });
      for (int64_t strip = mine.begin; strip < mine.end; ++strip) {
        const Strip place = strip_at(strip);
        const int64_t column = place.column, count = place.count, to_row = place.to_row;
        typename S::Vec sums[kStrip / kLanes > 0 ? kStrip / kLanes : 1] = {};
        for (int64_t k = 0; k < rows; ++k) {
          const T* const from = a.left + (k0 + k) * a.left_stride + column;
          for (int64_t j = 0, v = 0; j < count; j += kLanes, ++v) {
            const typename S::Vec x = S::load(from + j, count - j);
            sums[v] += x;
            S::store(left + k * kStrip + j, x);
          }
        }
        if (sum && p0 == my_panels.begin) {
          for (int64_t j = 0, v = 0; j < count; j += kLanes, ++v) {
            T* const to = a.sums + to_row + j;
            S::store(to, k0 > 0 ? S::load(to, count - j) + sums[v] : sums[v], count - j);
          }
        }
        slice_groups<1>(p0, p1, [&]<int NP>(int64_t panel) {
          const T* const w = right + (panel - p0) * rows * kLanes;
          const int64_t columns = a.N - panel * kLanes;
          row_blocks<max_rows(NP)>(count, [&]<int MR>(int64_t r0) {
            T* const out = a.out + (to_row + r0) * a.N + panel * kLanes;
            auto start = [&](int r, int v) {
              return k0 > 0 ? S::load(out + r * a.N + v * kLanes, columns - v * kLanes) : typename S::Vec{};
            };
            auto finish = [&](int r, int v, typename S::Vec total) {
              S::store(out + r * a.N + v * kLanes, total, columns - v * kLanes);
            };
            block_product<T, MR, NP, kStrip>(left + r0, 1, rows, w, start, finish);
          });
        });
      }
    }
    p0 = p1;
  } while (p0 < my_panels.end);
}

// ---- Forward

// One vector more than the panels: rows a power of two apart would share few sets of L1.
template <typename T>
int64_t state_stride(int64_t H) {
  return (panels_of<T>(H) + 1) * Simd<T>::kLanes;
}

// Steps whose input projection is computed at once: enough rows to reuse the weights, few enough to stay in L2.
template <typename T>
WEFT_INLINE int64_t chunk_steps(const RnnSequence& s, const RnnPart& part) {
  const int64_t rows = part.b1 - part.b0;
  const int64_t row_bytes = (part.p1 - part.p0) * gate_blocks(s.cell) * Simd<T>::kLanes * sizeof(T);
  const int64_t fit = 65536 / (row_bytes > 0 ? row_bytes : 1);
  const int64_t steps = (fit < 96 ? 96 : fit) / rows;
  return smaller(s.steps, steps < 8 ? 8 : steps / 8 * 8);
}

template <typename T>
int64_t forward_scratch(const RnnForwardArgs<T>& a, const RnnPart& part) {
  const RnnSequence& s = a.sequence;
  const int64_t rows = part.b1 - part.b0, own = (part.p1 - part.p0) * Simd<T>::kLanes, G = gate_blocks(s.cell);
  return own *
         (G + 1 + rows * (other_states(s.cell) > 1 ? other_states(s.cell) : 1) + chunk_steps<T>(s, part) * rows * G);
}

template <typename T>
void forward_begin(const RnnForwardArgs<T>& a, const RnnPart& part, T* state) {
  const RnnSequence& s = a.sequence;
  const int64_t stride = state_stride<T>(s.H), j0 = part.p0 * Simd<T>::kLanes, j1 = part.p1 * Simd<T>::kLanes;
  for (int buffer = 0; buffer < 2; ++buffer) {
    for (int64_t b = part.b0; b < part.b1; ++b) {
      T* const row = state + (buffer * s.B + b) * stride;
      for (int64_t j = j0; j < j1; ++j) row[j] = a.h0 != nullptr && j < s.H ? a.h0[b * s.all + j] : T(0);
    }
  }
}

// Where step t's rows begin in the projection of a chunk that begins at t0.
WEFT_INLINE int64_t projected_row(const RnnSequence& s, const RnnPart& part, int64_t t0, int64_t t) {
  const int64_t rows = part.b1 - part.b0;
  return rows == s.B ? s.offsets[t] - s.offsets[t0] : (t - t0) * rows;
}

// projected (rows, panels, G, lanes) = W_ih x + bias for the steps [t0, t1).
template <typename T, int G>
__attribute__((noinline)) void project(const RnnForwardArgs<T>& a, const RnnPart& part, int64_t t0, int64_t t1,
                                       const T* w_ih, const T* bias, T* projected) {
  using S = Simd<T>;
  constexpr int kLanes = S::kLanes;
  const RnnSequence& s = a.sequence;
  const int64_t I = s.I, rows = part.b1 - part.b0, panels = part.p1 - part.p0, stride = panels * G * kLanes;
  for (int64_t k0 = 0; k0 < I; k0 += kDepthBlock) {
    const int64_t depth = smaller(kDepthBlock, I - k0);
    slice_groups<G>(0, panels, [&]<int NP>(int64_t panel) {
      constexpr int NV = NP * G;
      const T* const w = w_ih + (k0 * panels + panel * depth) * G * kLanes;
      const T* const first_sum = bias + panel * G * kLanes;
      // `count` rows of input, `step` apart from x on, to rows of projected, out_step apart.
      auto block = [&](const T* x, int64_t step, T* out, int64_t out_step, int64_t count) {
        row_blocks<max_rows(NV)>(count, [&]<int MR>(int64_t r0) {
          T* const to = out + r0 * out_step;
          const T* const from = k0 > 0 ? to : first_sum;
          const int64_t from_step = k0 > 0 ? out_step : 0;
          auto start = [&](int r, int v) { return S::load(from + r * from_step + v * kLanes); };
          auto finish = [&](int r, int v, typename S::Vec sum) { S::store(to + r * out_step + v * kLanes, sum); };
          block_product<T, MR, NV>(x + r0 * step + k0, step, depth, w, start, finish);
        });
      };
      T* const out = projected + panel * G * kLanes;
      // All rows of the chunk at once; blocks of steps of one sequence, so that few rows fill the register block, too,
      // and which was the faster way for many; or a product at each step.
      const bool all = rows == s.B, by_sequence = !all && !s.packed && (t1 - t0 >= 8 || t1 - t0 >= rows);
      const int64_t products = all ? 1 : by_sequence ? rows : t1 - t0;
      for (int64_t i = 0; i < products; ++i) {
        const int64_t t = all || by_sequence ? t0 : t0 + i, b = by_sequence ? i : 0;
        const int64_t count = all           ? s.offsets[t1] - s.offsets[t0]
                              : by_sequence ? t1 - t0
                                            : s.running(t, part.b0, part.b1);
        block(a.input + (s.offsets[t] + part.b0 + b) * I, by_sequence ? s.B * I : I,
              out + (projected_row(s, part, t0, t) + b) * stride, by_sequence ? rows * stride : stride, count);
      }
    });
  }
}

// The scratch of a part.
template <typename T, Cell C>
struct ForwardScratch {
  static constexpr int kLanes = Simd<T>::kLanes, G = gate_blocks(C);
  int64_t rows, own;
  T* bias;       // (panels, G, lanes): what the input side adds
  T* bias_m;     // (panels, lanes): of the recurrent side that stays apart
  T* c;          // (others, rows, own): the states beside h
  T* projected;  // (chunk * rows, panels, G, lanes): W_ih x + bias
  WEFT_INLINE ForwardScratch(const RnnPart& part, T* scratch)
      : rows(part.b1 - part.b0),
        own((part.p1 - part.p0) * kLanes),
        bias(scratch),
        bias_m(bias + own * G),
        c(bias_m + own),
        projected(c + (other_states(C) > 1 ? other_states(C) : 1) * rows * own) {}
};

// What a part needs before its first step.
template <typename T, Cell C>
void forward_start(const RnnForwardArgs<T>& a, const RnnPart& part, const ForwardScratch<T, C>& at) {
  constexpr int G = gate_blocks(C);
  constexpr int kLanes = Simd<T>::kLanes;
  const int64_t H = a.sequence.H, all = a.sequence.all, j0 = part.p0 * kLanes;
  for (int64_t p = 0; p < part.p1 - part.p0; ++p) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const int64_t j = j0 + p * kLanes + lane;
      const bool present = a.b_ih != nullptr && j < H;
      for (int g = 0; g < G; ++g) {
        const bool apart = g == Traits<C>::kApart;
        at.bias[(p * G + g) * kLanes + lane] =
            present ? a.b_ih[g * all + j] + (apart ? T(0) : a.b_hh[g * all + j]) : T(0);
      }
      at.bias_m[p * kLanes + lane] = sides_apart(C) && present ? a.b_hh[Traits<C>::kApart * all + j] : T(0);
    }
  }
  if constexpr (has_c(C)) {
    constexpr int kOthers = other_states(C);
    fill_zero(at.c, kOthers * at.rows * at.own);
    for (int i = 0; i < kOthers && a.c0 != nullptr; ++i) {
      copy_rows(a.c0 + (part.b0 * kOthers + i) * all + j0, kOthers * all, at.c + i * at.rows * at.own, at.own, at.rows,
                smaller(H - j0, at.own));
    }
  }
}

// A step of a part, at which `running` sequences run. h and h_next (rows, stride): the state before and after it, of
// all slices.
template <typename T, Cell C>
__attribute__((noinline)) void forward_step(const RnnForwardArgs<T>& a, const RnnPart& part,
                                            const ForwardScratch<T, C>& at, int64_t step, int64_t running, const T* h,
                                            T* h_next) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  constexpr int G = gate_blocks(C);
  constexpr int kLanes = S::kLanes;
  const RnnSequence& s = a.sequence;
  const int64_t chunk = chunk_steps<T>(s, part), chunk_start = step - step % chunk,
                chunk_end = smaller(chunk_start + chunk, s.steps);
  const int64_t t = s.reverse ? s.steps - 1 - step : step, t0 = s.reverse ? s.steps - chunk_end : chunk_start;
  const int64_t H = s.H, all = s.all, own = at.own, stride = state_stride<T>(H), projected_stride = own * G,
                row0 = s.offsets[t] + part.b0, j0 = part.p0 * kLanes;
  const T* const x_step = at.projected + projected_row(s, part, t0, t) * projected_stride;
  const T* const bias_m = at.bias_m;
  T* const c = at.c;
  const T* const w_hh = a.w_hh + part.p0 * G * kLanes * H;
  slice_groups<G>(part.p0, part.p1, [&]<int NP>(int64_t panel) {
    constexpr int NV = NP * G;
    const int64_t local = (panel - part.p0) * kLanes;
    const T* const w = w_hh + local * G * H;
    row_blocks<max_rows(NV)>(running, [&]<int MR>(int64_t first) {
      const T* const x = x_step + first * projected_stride + local * G;
      alignas(64) T pre[MR * NV * kLanes];
      auto start = [&](int r, int v) {
        // The recurrent side of a gate whose sides stay apart begins with its own bias.
        if (v == Traits<C>::kApart) return S::load(bias_m + local);
        return S::load(x + r * projected_stride + v * kLanes);
      };
      auto finish = [&](int r, int v, Vec sum) { S::store(pre + (r * NV + v) * kLanes, sum); };
      block_product<T, MR, NV>(h + first * stride, stride, H, w, start, finish);

#pragma GCC unroll 1
      for (int r = 0; r < MR; ++r) {
        const int64_t row = row0 + first + r;
        for (int p = 0; p < NP; ++p) {
          const int64_t j = (panel + p) * kLanes, lanes = H - j;
          const T* gate = pre + (r * NV + p * G) * kLanes;
          T* const cell = c + (first + r) * own + local;
          const Vec next =
              cell_forward<T, C>(gate, x + r * projected_stride + (G - 1) * kLanes, h + (first + r) * stride + j, cell,
                                 at.rows * own, a.gates == nullptr ? nullptr : a.gates + row * 4 * all + j, all, lanes);
          if (has_c(C) && a.cells != nullptr) {
            for (int i = 0; i < kept_states(C); ++i) {
              S::store(a.cells + row * kept_states(C) * s.stride + i * all + j, S::load(cell + i * at.rows * own),
                       lanes);
            }
          }
          S::store(h_next + (first + r) * stride + j, next);
          S::store(a.output + row * s.stride + j, next, lanes);
        }
      }
    });
  });
  // Sequences that this was the last step of; without reverse they are the shortest ones.
  const int64_t staying = step + 1 < s.steps ? s.running(s.reverse ? t - 1 : t + 1, part.b0, part.b1) : 0;
  if (staying < running) {
    copy_rows(h_next + staying * stride + j0, stride, a.h_n + (part.b0 + staying) * all + j0, all, running - staying,
              smaller(H - j0, own));
  }
}

// The input projection of the chunk of steps that begins at `step`.
template <typename T, Cell C>
WEFT_INLINE void forward_project(const RnnForwardArgs<T>& a, const RnnPart& part, const ForwardScratch<T, C>& at,
                                 int64_t step) {
  constexpr int G = gate_blocks(C);
  const RnnSequence& s = a.sequence;
  const int64_t end = smaller(step + chunk_steps<T>(s, part), s.steps), t0 = s.reverse ? s.steps - end : step;
  project<T, G>(a, part, t0, t0 + end - step, a.w_ih + part.p0 * G * Simd<T>::kLanes * s.I, at.bias, at.projected);
}

template <typename T, Cell C>
void forward(const RnnForwardArgs<T>& a, const RnnGroup<T>& group, T* state) {
  constexpr int kLanes = Simd<T>::kLanes;
  const RnnSequence& s = a.sequence;
  const int64_t b0 = group.parts[0].b0, b1 = group.parts[0].b1, stride = state_stride<T>(s.H);
  Crew crew = group.crew;
  const auto each_part = [&](auto f) {
    const Range mine = crew.mine();
    for (int64_t i = mine.begin; i < mine.end; ++i)
      f(group.parts[i], ForwardScratch<T, C>(group.parts[i], group.scratch[i]));
  };
  each_part([&](const RnnPart& part, const ForwardScratch<T, C>& at) { forward_start<T, C>(a, part, at); });
  T* h = state + b0 * stride;
  T* h_next = h + s.B * stride;
  for (int64_t step = 0; step < s.steps && crew.present(); ++step) {
    const int64_t running = s.running(s.reverse ? s.steps - 1 - step : step, b0, b1);
    each_part([&](const RnnPart& part, const ForwardScratch<T, C>& at) {
      if (step % chunk_steps<T>(s, part) == 0) forward_project<T, C>(a, part, at, step);
      if (running > 0) forward_step<T, C>(a, part, at, step, running, h, h_next);
    });
    if (running == 0) continue;
    crew.meet();
    T* const last = h;
    h = h_next;
    h_next = last;
  }
  if constexpr (has_c(C)) {
    each_part([&](const RnnPart& part, const ForwardScratch<T, C>& at) {
      constexpr int kOthers = other_states(C);
      const int64_t j0 = part.p0 * kLanes;
      for (int i = 0; i < kOthers; ++i) {
        copy_rows(at.c + i * at.rows * at.own, at.own, a.c_n + (b0 * kOthers + i) * s.all + j0, kOthers * s.all,
                  at.rows, smaller(s.H - j0, at.own));
      }
    });
  }
}

template <typename T>
void forward(const RnnForwardArgs<T>& a, const RnnGroup<T>& group, T* state) {
  with_cell(a.sequence.cell, [&]<Cell C>() { forward<T, C>(a, group, state); });
}

// ---- Backward
//
// A step turns the gradient of the state into the gradients before the nonlinearities (dgates), for the thread's own
// hidden units, and multiplies those of all slices by its own columns of W_hh. Gradients of states that end or begin at
// this step wait in dh and dc, where forward's last step finds them and backward's last one leaves them.

template <typename T>
int64_t backward_scratch(const RnnBackwardArgs<T>& a, const RnnPart& part) {
  const int others = other_states(a.sequence.cell);
  return (1 + (others > 1 ? others : 1)) * (part.b1 - part.b0) * (part.p1 - part.p0) * Simd<T>::kLanes;
}

// dh (rows, own) [+]= d (rows, depth) times the slice's weights.
template <typename T>
__attribute__((noinline)) void propagate(const T* d, int64_t d_stride, int64_t depth, const T* weights, T* dh,
                                         int64_t own, int64_t rows, bool add) {
  using S = Simd<T>;
  slice_groups<1>(0, own / S::kLanes, [&]<int NP>(int64_t panel) {
    const T* const w = weights + panel * S::kLanes * depth;
    row_blocks<max_rows(NP)>(rows, [&]<int MR>(int64_t first) {
      T* const to = dh + first * own + panel * S::kLanes;
      auto start = [&](int, int) { return typename S::Vec{}; };
      auto finish = [&](int r, int v, typename S::Vec sum) {
        T* const at = to + r * own + v * S::kLanes;
        // A sum that began with a value far larger than its terms would round that value once per term.
        S::store(at, add ? S::load(at) + sum : sum);
      };
      block_product<T, MR, NP>(d + first * d_stride, d_stride, depth, w, start, finish);
    });
  });
}

// The scratch of a part.
template <typename T>
struct BackwardScratch {
  int64_t rows, own;
  T* dh;  // (rows, own): what has arrived at the state from later steps
  T* dc;  // (others, rows, own): the same for the states beside h
  WEFT_INLINE BackwardScratch(const RnnPart& part, T* scratch)
      : rows(part.b1 - part.b0), own((part.p1 - part.p0) * Simd<T>::kLanes), dh(scratch), dc(dh + rows * own) {}
};

// dgates of a part at a step, at which `running` sequences run.
template <typename T, Cell C>
__attribute__((noinline)) void backward_step(const RnnBackwardArgs<T>& a, const RnnPart& part,
                                             const BackwardScratch<T>& at, int64_t step, int64_t running) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  constexpr int kLanes = S::kLanes, G = gate_blocks(C);
  const RnnSequence& s = a.sequence;
  constexpr int kOthers = other_states(C), kKept = kept_states(C);
  const int64_t H = s.H, all = s.all, own = at.own, j0 = part.p0 * kLanes, panels = part.p1 - part.p0;
  T* const dh = at.dh;
  T* const dc = at.dc;
  const int64_t t = s.reverse ? s.steps - 1 - step : step;
  // The states of sequences from `fresh` on begin at this step.
  const int64_t t_before = s.reverse ? t + 1 : t - 1;
  const int64_t fresh = step > 0 ? s.running(t_before, part.b0, part.b1) : 0;
  const int64_t row0 = s.offsets[t] + part.b0, row_before = step > 0 ? s.offsets[t_before] + part.b0 : 0;
  for (int64_t r = 0; r < running; ++r) {
    const int64_t row = row0 + r;
    const T *h_before = nullptr, *c_before = nullptr;
    if (r < fresh) {
      h_before = a.output + (row_before + r) * s.stride;
      if (has_c(C)) c_before = a.cells + (row_before + r) * kKept * s.stride;
    } else {
      if (a.h0 != nullptr) h_before = a.h0 + (part.b0 + r) * all;
      if (a.c0 != nullptr) c_before = a.c0 + (part.b0 + r) * kOthers * all;
    }
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t j = j0 + panel * kLanes, lanes = H - j;
      T* const carried = dh + r * own + panel * kLanes;
      T* const d = a.dgates + row * a.d_stride + j;
      Vec grad = S::load(carried);
      if (a.grad_output != nullptr) grad += S::load(a.grad_output + row * s.stride + j, lanes);
      const T* const state_before = Traits<C>::kBefore == StateName::kH   ? h_before
                                    : Traits<C>::kBefore == StateName::kC ? c_before
                                                                          : nullptr;
      const CellGrads<T, C> grads = cell_backward<T, C>(
          grad, a.output + row * s.stride + j, a.gates + row * 4 * all + j, all,
          state_before != nullptr ? state_before + j : nullptr, a.cells + row * kKept * s.stride + j,
          a.grad_cells == nullptr ? nullptr : a.grad_cells + row * kKept * s.stride + j, carried,
          dc + r * own + panel * kLanes, at.rows * own, lanes);
      for (int block = 0; block < chain_blocks(C); ++block) {
        // See RnnBackwardArgs: the gate whose sides stay apart is the first.
        S::store(d + block * H, grads.d[sides_apart(C) && block < G ? (block + G - 1) % G : block], lanes);
      }
    }
  }
}

template <typename T, Cell C>
void backward(const RnnBackwardArgs<T>& a, const RnnGroup<T>& group) {
  constexpr int G = gate_blocks(C), kOthers = other_states(C);
  constexpr int kLanes = Simd<T>::kLanes;
  const RnnSequence& s = a.sequence;
  const int64_t H = s.H, all = s.all, b0 = group.parts[0].b0, b1 = group.parts[0].b1;
  Crew crew = group.crew;
  const auto each_part = [&](auto f) {
    const Range mine = crew.mine();
    for (int64_t i = mine.begin; i < mine.end; ++i)
      f(group.parts[i], BackwardScratch<T>(group.parts[i], group.scratch[i]));
  };
  each_part([&](const RnnPart& part, const BackwardScratch<T>& at) {
    const int64_t j0 = part.p0 * kLanes, columns = smaller(H - j0, at.own), size = at.rows * at.own;
    fill_zero(at.dh, (1 + kOthers) * size);
    if (a.grad_h_n != nullptr) copy_rows(a.grad_h_n + b0 * all + j0, all, at.dh, at.own, at.rows, columns);
    for (int i = 0; i < kOthers && a.grad_c_n != nullptr; ++i) {
      copy_rows(a.grad_c_n + (b0 * kOthers + i) * all + j0, kOthers * all, at.dc + i * size, at.own, at.rows, columns);
    }
  });
  for (int64_t step = s.steps - 1; step >= 0 && crew.present(); --step) {
    const int64_t t = s.reverse ? s.steps - 1 - step : step;
    const int64_t running = s.running(t, b0, b1);
    if (running == 0) continue;
    each_part(
        [&](const RnnPart& part, const BackwardScratch<T>& at) { backward_step<T, C>(a, part, at, step, running); });
    if (step == 0 && a.grad_h0 == nullptr) break;
    crew.meet();
    each_part([&](const RnnPart& part, const BackwardScratch<T>& at) {
      propagate(a.dgates + (s.offsets[t] + b0) * a.d_stride + (sides_apart(C) ? H : 0), a.d_stride, G * H,
                a.w_hh + part.p0 * kLanes * G * H, at.dh, at.own, running, Traits<C>::kBefore == StateName::kH);
    });
  }
  each_part([&](const RnnPart& part, const BackwardScratch<T>& at) {
    const int64_t j0 = part.p0 * kLanes, columns = smaller(H - j0, at.own), size = at.rows * at.own;
    if (a.grad_h0 != nullptr) copy_rows(at.dh, at.own, a.grad_h0 + b0 * all + j0, all, at.rows, columns);
    for (int i = 0; i < kOthers && a.grad_c0 != nullptr; ++i) {
      copy_rows(at.dc + i * size, at.own, a.grad_c0 + (b0 * kOthers + i) * all + j0, kOthers * all, at.rows, columns);
    }
  });
}

template <typename T>
void backward(const RnnBackwardArgs<T>& a, const RnnGroup<T>& group) {
  with_cell(a.sequence.cell, [&]<Cell C>() { backward<T, C>(a, group); });
}

template <typename T>
constexpr RnnKernels<T> kRnnKernels = {
    Simd<T>::kLanes,  packed_size<T>, pack<T>,     forward_scratch<T>, backward_scratch<T>,   state_stride<T>,
    forward_begin<T>, forward<T>,     backward<T>, multiply<T>,        transposed_scratch<T>, transposed<T>};

}  // namespace
}  // namespace weft::rnn::WEFT_ISA

namespace weft::cpu::WEFT_ISA {
const rnn::RnnTables rnn_kernels = {rnn::WEFT_ISA::kRnnKernels<float>, rnn::WEFT_ISA::kRnnKernels<double>};
}
