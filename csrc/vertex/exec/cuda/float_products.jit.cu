// Products of float matrices on the tensor cores of compute capability 9.0, with the accuracy of fp32: each number is
// the sum of three of bf16, and the six largest products of these are added up in fp32.
//
// Decomposition: a block has a tile of 128 x 128 of a result, its two warpgroups 64 rows each. The inner dimension goes
// by in chunks of 32: numbers come into L2 five chunks ahead, into registers two, and as bf16 into shared memory one
// chunk ahead, while the tensor cores multiply. However a factor lies, a thread takes 8 neighbours of the inner
// dimension, so that both factors look the same there. The tensor cores cut sums off instead of rounding them, so every
// two chunks leave them.
//
// The chunks of all tiles of all products are dealt to the blocks evenly. A block whose part of a tile is not all of it
// leaves the sums in memory, and the last of a tile's blocks adds them up in their order: the bits are the same in
// every run, without atomics on numbers.
//
// An infinity is NaN this way, and so are numbers that bf16 does not reach: what comes out as NaN is summed up again,
// one by one.
//
// Cost: 1,540 clocks of a multiprocessor's tensor cores for 128 x 128 x 32, three times as fast as fp32 multiply-adds
// at most; 32 KB of L2 for as much. On an H200 it is bound by waiting for its numbers, not by the tensor cores: 3,800
// clocks if no lines are brought to L2 ahead, which still is half of what cuBLAS takes in fp32 for 9,000 rows.
#include "common/cuda/warpgroup.jit.cuh"
#include "common/cuda/words.jit.cuh"
#include "vertex/exec/cuda/float_products.jit.cuh"

namespace {

using namespace weft;
using weft::vertex::FloatFactor;
using weft::vertex::FloatProduct;
using weft::vertex::FloatProducts;

constexpr int kTile = weft::vertex::kFloatTile, kDepth = weft::vertex::kFloatDepth;
constexpr int kThreads = weft::vertex::kFloatThreads, kWarps = kThreads / 32;
constexpr int kOctet = weft::vertex::kFloatOctet, kPlane = weft::vertex::kFloatPlane, kFactor = 3 * kPlane;
constexpr int kStage = weft::vertex::kFloatStage, kChunksInside = 2, kAhead = 5;
constexpr int kHeld = kTile * kDepth / 8 / kThreads;  // times 8 neighbours that a thread takes of a factor's chunk
static_assert(kHeld == 2 && kTile == 2 * 64 && kDepth == 32);
constexpr int kResultPitch = kTile + 8;
static_assert(kTile * kResultPitch * 4 <= 2 * kStage);

// A tile's part of a factor, chunk after chunk.
struct Side {
  const float* at[kHeld];  // what the thread takes next
  int stride;
  bool by_inner;
  int there;  // rows of the tile; of the right factor, columns

  // From `inner` on of the inner dimension, and from row `first` on, of `all`.
  __device__ __forceinline__ Side(const FloatFactor& f, int inner, int first, int all)
      : stride(int(f.stride)), by_inner(f.by_inner), there(all - first) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const long long k = inner + octet(i) * 8, other = first + row(i);
      at[i] = f.data + (by_inner ? other * f.stride + k : k * f.stride + other);
    }
  }
  // What the thread has of a chunk: lanes read neighbours, and write in different banks.
  __device__ __forceinline__ int row(int i) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return by_inner ? (warp + i * kWarps) * 8 + lane / 4 : warp % 4 * 32 + lane;
  }
  __device__ __forceinline__ int octet(int i) const {
    return by_inner ? threadIdx.x % 4 : int(threadIdx.x / 128) + i * 2;
  }
};

// One of the lines of 128 bytes of a factor's chunks, which half of the threads bring to L2 ahead of time: memory
// answers later than the registers' two chunks begin.
struct Line {
  const float* at;
  int apart;  // from chunk to chunk
  int inner;  // how far it is from the line to the end of the inner dimension

  __device__ __forceinline__ Line(const FloatFactor& f, int begin, int inner_all, int first, int all) {
    const int thread = threadIdx.x % (kThreads / 2);
    const long long k = begin + (f.by_inner ? 0 : thread / 4), other = first + (f.by_inner ? thread : thread % 4 * 32);
    at = f.data + (f.by_inner ? other * f.stride + k : k * f.stride + other);
    apart = f.by_inner ? kDepth : kDepth * int(f.stride);
    inner = other < all ? inner_all - int(k) : 0;
  }
  __device__ __forceinline__ void bring(int chunk) const {
    if (chunk * kDepth < inner) prefetch_l2(at + static_cast<long long>(chunk) * apart);
  }
};

struct Held {
  float x[kHeld][8];
};

// The next chunk, of which `inner` of the inner dimension are there; beyond, zeros.
__device__ __forceinline__ void ask(Side& side, int inner, Held& held) {
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int left = side.row(i) < side.there ? inner - side.octet(i) * 8 : 0;
    const float* const from = side.at[i];
    float(&x)[8] = held.x[i];
    if (side.by_inner) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (left >= half * 4 + 4) {
          const float4 four = *reinterpret_cast<const float4*>(from + half * 4);
          x[half * 4] = four.x, x[half * 4 + 1] = four.y, x[half * 4 + 2] = four.z, x[half * 4 + 3] = four.w;
        } else {
#pragma unroll
          for (int e = half * 4; e < half * 4 + 4; ++e) x[e] = e < left ? from[e] : 0.0f;
        }
      }
      side.at[i] += kDepth;
    } else {
      if (left >= 8) {
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] = from[e * side.stride];
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] = e < left ? from[e * side.stride] : 0.0f;
      }
      side.at[i] += static_cast<long long>(kDepth) * side.stride;
    }
  }
}

// One of the three numbers of bf16, the largest first, for each of 8 numbers; leaves their rests.
__device__ __forceinline__ void put(const Side& side, int i, int plane, float (&x)[8], u32 to) {
  uint4 eight;
  eight.x = take_bf16(x[0], x[1]), eight.y = take_bf16(x[2], x[3]);
  eight.z = take_bf16(x[4], x[5]), eight.w = take_bf16(x[6], x[7]);
  store_shared(to + plane * kPlane + side.octet(i) * kOctet + side.row(i) * 16, eight);
}

// Piece `piece` of what a thread puts of a chunk.
constexpr int kPieces = 2 * kHeld * 3;
__device__ __forceinline__ void put_piece(int piece, const Side& left, const Side& right, Held& of_left, Held& of_right,
                                          u32 stage) {
  const int i = piece / 3 % kHeld, plane = piece % 3;
  if (piece < kPieces / 2) {
    put(left, i, plane, of_left.x[i], stage);
  } else {
    put(right, i, plane, of_right.x[i], stage + kFactor);
  }
}

// Of a chunk of both factors; begins the sums where they are not to be added to. Meanwhile puts what is held of the
// next one, between the products, because a warp waits until the tensor cores take them.
template <typename Put>
__device__ __forceinline__ void multiply(u32 stage, int group, bool more, float (&d)[64], const Put& put_next) {
  const auto left = [&](int plane, int k) {
    return warpgroup_factor(stage + plane * kPlane + k * 2 * kOctet + group * 64 * 16, kOctet, 128);
  };
  const auto right = [&](int plane, int k) {
    return warpgroup_factor(stage + kFactor + plane * kPlane + k * 2 * kOctet, kOctet, 128);
  };
  constexpr int kTerms = 6, kProducts = kTerms * (kDepth / 16), kFirst = 4;  // which numbers have come by then
  constexpr int kLeft[kTerms] = {2, 0, 1, 1, 0, 0}, kRight[kTerms] = {0, 2, 1, 0, 1, 0};  // the small ones first
  warpgroup_begin();
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    const int k = i / kTerms, term = i % kTerms;
    warpgroup_mma_bf16(d, left(kLeft[term], k), right(kRight[term], k), more || i > 0);
    if (i + 1 == kProducts) warpgroup_commit();
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      if (piece * (kProducts - kFirst) / kPieces + kFirst == i) put_next(piece);
    }
  }
}

__device__ __noinline__ float one_by_one(const FloatProduct& p, int row, int column) {
  const auto from = [](const FloatFactor& f, int i) { return f.data + (f.by_inner ? i * f.stride : i); };
  const float *const left = from(p.left, row), *const right = from(p.right, column);
  const long long left_apart = p.left.by_inner ? 1 : p.left.stride, right_apart = p.right.by_inner ? 1 : p.right.stride;
  float sum = 0.0f;
  for (int k = 0; k < p.inner; ++k) sum = fmaf(left[k * left_apart], right[k * right_apart], sum);
  return sum;
}

// Leaves the block's sums of a part of a tile in memory, the first part or a later one. Whether it is the last to do
// so: then it has the sums of all parts.
__device__ __forceinline__ bool add_up_parts(const FloatProducts& all, const FloatProduct& p, int tile, int chunks,
                                             bool is_first, u32* flag, float (&sums)[64]) {
  const int unit = p.units_before + tile * chunks, blocks = gridDim.x;
  const int from = weft::vertex::block_of_unit(unit, all.units, blocks);
  const int to = weft::vertex::block_of_unit(unit + chunks - 1, all.units, blocks);
  const auto partial = [&](int block, bool first) {  // a block has a later part of one tile, and the first of another
    return reinterpret_cast<float4*>(all.partial) + (block * 2 + first) * (16 * kThreads) + threadIdx.x;
  };
  float4* const own = partial(blockIdx.x, is_first);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    own[i * kThreads] = {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
  }
  __syncthreads();
  if (threadIdx.x == 0) *flag = arrive(all.arrived + p.tiles_before + tile);
  __syncthreads();
  if (*flag != u32(to - from)) return false;
#pragma unroll
  for (int i = 0; i < 64; ++i) sums[i] = 0.0f;
#pragma unroll 1
  for (int other = from; other <= to; ++other) {
    const float4* const of_other = partial(other, other == from);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float4 four = of_other[i * kThreads];
      sums[4 * i] += four.x, sums[4 * i + 1] += four.y, sums[4 * i + 2] += four.z, sums[4 * i + 3] += four.w;
    }
  }
  return true;
}

// The tile's sums go through shared memory, so that neighbours are stored together.
__device__ __forceinline__ void store(const FloatProduct& p, int top, int begin, const float (&sums)[64],
                                      float* shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __syncthreads();  // nobody multiplies any more
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int row = warp * 16 + lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    shared[row * kResultPitch + column] = sums[i];
  }
  __syncthreads();
  const int rows = min(kTile, p.rows - top), column = begin + threadIdx.x % kTile;
  if (column >= p.columns) return;
  const float bias = p.bias != nullptr ? p.bias[column] : 0.0f;
#pragma unroll 4
  for (int i = threadIdx.x / kTile; i < rows; i += kThreads / kTile) {
    float sum = shared[i * kResultPitch + column - begin];
    if (sum != sum) sum = one_by_one(p, top + i, column);
    float* const to = p.result + (top + i) * p.stride + column;
    sum += bias;
    *to = p.more ? *to + sum : sum;
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    vertex_float_products(const __grid_constant__ FloatProducts all) {
  unsigned char* const shared = dynamic_shared_memory();
  const u32 stages = shared_address(shared);
  u32* const flag = reinterpret_cast<u32*>(shared + 2 * kStage);
  const int group = threadIdx.x / 128, blocks = gridDim.x, block = blockIdx.x;
  const int end = weft::vertex::first_unit(block + 1, all.units, blocks);
  int which = 0;
  for (int unit = weft::vertex::first_unit(block, all.units, blocks); unit < end;) {
    while (which + 1 < all.count && all.of[which + 1].units_before <= unit) ++which;
    const FloatProduct& p = all.of[which];
    const int chunks = weft::vertex::float_chunks(p.inner), local = unit - p.units_before, tile = local / chunks;
    const int tiles_across = weft::vertex::float_tiles(p.columns);
    const int top = tile / tiles_across * kTile, begin = tile % tiles_across * kTile;
    const int first = local % chunks, count = min(chunks - first, end - unit);
    unit += count;
    Side left(p.left, first * kDepth, top, p.rows), right(p.right, first * kDepth, begin, p.columns);
    Held of_left, of_right;
    const auto ask_for = [&](int chunk) {
      const int inner = p.inner - (first + chunk) * kDepth;
      ask(left, inner, of_left);
      ask(right, inner, of_right);
    };
    const auto put_piece_of = [&](int chunk, int piece) {
      put_piece(piece, left, right, of_left, of_right, stages + chunk % 2 * kStage);
    };
    float d[64] = {}, sums[64] = {};
    const Line line(group == 0 ? p.left : p.right, first * kDepth, p.inner, group == 0 ? top : begin,
                    group == 0 ? p.rows : p.columns);
    ask_for(0);
    for (int chunk = 2; chunk < min(count, kAhead); ++chunk) line.bring(chunk);
    __syncthreads();  // the tile before is done with the stages
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) put_piece_of(0, piece);
    if (count > 1) ask_for(1);
    for (int chunk = 0; chunk < count; ++chunk) {
      fence_copy_engine();  // what the thread has put there is seen by the tensor cores
      __syncthreads();
      // After the last chunk nobody reads what is put.
      multiply(stages + chunk % 2 * kStage, group, chunk % kChunksInside > 0, d,
               [&](int piece) { put_piece_of(chunk + 1, piece); });
      if (chunk + 2 < count) ask_for(chunk + 2);
      if (chunk + kAhead < count) line.bring(chunk + kAhead);
      warpgroup_wait(d);
      if (chunk % kChunksInside == kChunksInside - 1 || chunk + 1 == count) {
#pragma unroll
        for (int i = 0; i < 64; ++i) sums[i] += d[i];
      }
    }
    if (count < chunks && !add_up_parts(all, p, tile, chunks, first == 0, flag, sums)) continue;
    store(p, top, begin, sums, reinterpret_cast<float*>(shared));
  }
}
