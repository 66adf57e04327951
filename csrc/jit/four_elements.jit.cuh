// Four neighbours of the reduction of a product, which a lane has at once: how they are read, waited for, and put
// before the tensor cores.
#pragma once

#include "common/cuda/ptx.jit.cuh"
#include "common/cuda/words.jit.cuh"
#include "common/elementwise.jit.cuh"

namespace weft {

template <typename E>
inline constexpr bool kIsFloat16 = false;
template <>
inline constexpr bool kIsFloat16<Float16> = true;

// How products are made: fp32 accuracy; as the tensor cores take floats; of half types, whose products are exact.
enum class Multiply { kFloat, kTf32, kHalf };

template <typename E>
struct alignas(4 * sizeof(E)) FourOf {
  E x[4];
};

// Four elements of a row or a column, of which so many are there; `fours`: they are neighbours, aligned as such.
template <typename E>
__device__ __forceinline__ FourOf<E> four_at(const E* from, long long inner_stride, bool fours, int there) {
  if (there >= 4 && fours) return *reinterpret_cast<const FourOf<E>*>(from);
  FourOf<E> four;
#pragma unroll
  for (int e = 0; e < 4; ++e) four.x[e] = e < there ? from[e * inner_stride] : E(0.0f);
  return four;
}
// The same of all four while others run, where elements are not too short for that.
template <typename E>
__device__ __forceinline__ void copy_four(const E* from, long long inner_stride, bool fours, FourOf<E>& to) {
  if (fours) {
    copy_async<int(sizeof(to))>(&to, from);
  } else if constexpr (sizeof(E) == 4) {
#pragma unroll
    for (int e = 0; e < 4; ++e) copy_async<4>(to.x + e, from + e * inner_stride);
  } else {
    to = four_at(from, inner_stride, false, 4);
  }
}
template <Multiply kMultiply, typename E>
__device__ __forceinline__ FourOf<E> as_multiplied(FourOf<E> four) {
  if constexpr (kMultiply == Multiply::kTf32) {
#pragma unroll
    for (int e = 0; e < 4; ++e) four.x[e] = __uint_as_float(round_tf32(__float_as_uint(four.x[e])));
  }
  return four;
}

template <typename E>
__device__ __forceinline__ void ask_published(const E* from, FourOf<E>& to) {
  if constexpr (sizeof(E) == 2) {
    load_published(reinterpret_cast<const unsigned short*>(from), reinterpret_cast<unsigned short(&)[4]>(to.x));
  } else {
    load_published(from, to.x);
  }
}
// Of what was asked for. Nothing is remembered of it, which would wait for it then.
template <typename E>
__device__ __forceinline__ bool is_missing(const FourOf<E>& four) {
  bool found = false;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if constexpr (sizeof(E) == 2) {
      found |= four.x[e].bits == 0xffffu;
    } else {
      found |= __float_as_uint(four.x[e]) == ~0u;
    }
  }
  return found;
}

// A float as what the tensor cores multiply, and the rest of it.
template <Multiply kMultiply>
__device__ __forceinline__ void split(float x, u32& high, u32& low) {
  if constexpr (kMultiply == Multiply::kFloat) {
    high = cut_tf32(__float_as_uint(x)), low = __float_as_uint(x - __uint_as_float(high));
  } else {
    high = __float_as_uint(x), low = 0;
  }
}

// The same of a fragment whose registers come from two loads. Cut off, high would be the same to the tensor cores as
// x, which the compiler then moves into place again and again.
template <Multiply kMultiply>
__device__ __forceinline__ void split_apart(float x, u32& high, u32& low) {
  if constexpr (kMultiply == Multiply::kFloat) {
    split_tf32(x, high, low);
  } else {
    split<kMultiply>(x, high, low);
  }
}

// Two of four neighbours.
template <typename E>
__device__ __forceinline__ u32 pair_of(const FourOf<E>& four, int which) {
  return u32(four.x[2 * which].bits) | u32(four.x[2 * which + 1].bits) << 16;
}
template <typename E>
__device__ __forceinline__ void mma_half(float (&d)[4], const u32* a, const u32* b) {
  if constexpr (kIsFloat16<E>) {
    mma_f16(d, a, b);
  } else {
    mma_bf16(d, a, b);
  }
}

}  // namespace weft
