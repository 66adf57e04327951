// SIMD vectors, their elementary functions and the register block of CPU kernels, in GCC's vector extensions: included
// once per instruction set, behind baseline-, avx2- or avx512-begin-inl.h, which set
//   WEFT_ISA            a namespace of its own, so that no two instruction sets share a symbol
//   WEFT_VECTOR_BYTES   16, 32 or 64
//   WEFT_REGISTERS      how many vector registers there are: 16 or 32
// Of AVX-512, the forms without a mask draw false warnings from GCC 12's header.
// No function template of the standard library is used here, nor in what includes it: one that is not inlined would be
// emitted with this instruction set under a name that the linker merges with everybody else's.
#pragma once
#include <cstdint>

namespace weft::cpu::WEFT_ISA {
namespace {

template <typename T>
struct Types;

template <>
struct Types<float> {
  using Bits = int32_t;
  typedef float Vec __attribute__((vector_size(WEFT_VECTOR_BYTES)));
  typedef float Unaligned __attribute__((vector_size(WEFT_VECTOR_BYTES), aligned(4), may_alias));
  typedef int32_t Int __attribute__((vector_size(WEFT_VECTOR_BYTES)));
};

template <>
struct Types<double> {
  using Bits = int64_t;
  typedef double Vec __attribute__((vector_size(WEFT_VECTOR_BYTES)));
  typedef double Unaligned __attribute__((vector_size(WEFT_VECTOR_BYTES), aligned(8), may_alias));
  typedef int64_t Int __attribute__((vector_size(WEFT_VECTOR_BYTES)));
};

#define WEFT_INLINE inline __attribute__((always_inline))

template <typename T>
struct Simd {
  using Vec = typename Types<T>::Vec;
  using Int = typename Types<T>::Int;
  using Unaligned = typename Types<T>::Unaligned;
  static constexpr int kLanes = WEFT_VECTOR_BYTES / sizeof(T);

  // x - 0 is x for every x, -0 and NaN included, and compiles to a broadcast.
  static WEFT_INLINE Vec broadcast(T x) { return x - Vec{}; }
  static WEFT_INLINE Vec load(const T* p) { return *reinterpret_cast<const Vec*>(p); }
  static WEFT_INLINE void store(T* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }

#if WEFT_VECTOR_BYTES == 32
  static WEFT_INLINE Int first_lanes(int64_t n) {
    if constexpr (sizeof(T) == 4) return Int{0, 1, 2, 3, 4, 5, 6, 7} < int32_t(n);
    if constexpr (sizeof(T) == 8) return Int{0, 1, 2, 3} < n;
  }
#endif

  // The first n lanes, n >= 1, from and to memory of any alignment; the other lanes are zero, or left alone.
  static WEFT_INLINE Vec load(const T* p, int64_t n) {
    if (n >= kLanes) return *reinterpret_cast<const Unaligned*>(p);
#if WEFT_VECTOR_BYTES == 64
    if constexpr (sizeof(T) == 4) return (Vec)_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p);
    if constexpr (sizeof(T) == 8) return (Vec)_mm512_maskz_loadu_pd(__mmask8((1u << n) - 1), p);
#elif WEFT_VECTOR_BYTES == 32
    if constexpr (sizeof(T) == 4) return (Vec)_mm256_maskload_ps(p, (__m256i)first_lanes(n));
    if constexpr (sizeof(T) == 8) return (Vec)_mm256_maskload_pd(p, (__m256i)first_lanes(n));
#else
    Vec v{};
    for (int64_t i = 0; i < n; ++i) v[i] = p[i];
    return v;
#endif
  }
  static WEFT_INLINE void store(T* p, Vec v, int64_t n) {
    if (n >= kLanes) {
      *reinterpret_cast<Unaligned*>(p) = v;
      return;
    }
#if WEFT_VECTOR_BYTES == 64
    if constexpr (sizeof(T) == 4) _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), (__m512)v);
    if constexpr (sizeof(T) == 8) _mm512_mask_storeu_pd(p, __mmask8((1u << n) - 1), (__m512d)v);
#elif WEFT_VECTOR_BYTES == 32
    if constexpr (sizeof(T) == 4) _mm256_maskstore_ps(p, (__m256i)first_lanes(n), (__m256)v);
    if constexpr (sizeof(T) == 8) _mm256_maskstore_pd(p, (__m256i)first_lanes(n), (__m256d)v);
#else
    for (int64_t i = 0; i < n; ++i) p[i] = v[i];
#endif
  }

  // The sums of all lanes of four vectors, halves first. (Returned, a vector of four could be wider than a register.)
  typedef T Four __attribute__((vector_size(4 * sizeof(T))));
  static WEFT_INLINE void sums(const Vec (&v)[4], Four& sums) {
    typedef T Part __attribute__((vector_size(16)));
    constexpr int kParts = WEFT_VECTOR_BYTES / 16;
    Part part[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      Part parts[kParts];
      __builtin_memcpy(parts, &v[i], sizeof(Vec));
#pragma GCC unroll 2
      for (int count = kParts / 2; count > 0; count /= 2) {
#pragma GCC unroll 2
        for (int k = 0; k < count; ++k) parts[k] += parts[k + count];
      }
      part[i] = parts[0];
    }
    const auto &a = part[0], &b = part[1], &c = part[2], &d = part[3];
    if constexpr (sizeof(T) == 8) {
      sums = Four{a[0], b[0], c[0], d[0]} + Four{a[1], b[1], c[1], d[1]};
    } else {
      const Part ab = Part{a[0], a[1], b[0], b[1]} + Part{a[2], a[3], b[2], b[3]};
      const Part cd = Part{c[0], c[1], d[0], d[1]} + Part{c[2], c[3], d[2], d[3]};
      sums = Part{ab[0], ab[2], cd[0], cd[2]} + Part{ab[1], ab[3], cd[1], cd[3]};
    }
  }

  // NaN for NaN: x is the operand that the instructions return then.
  static WEFT_INLINE Vec clamp(Vec x, Vec low, Vec high) {
#if WEFT_VECTOR_BYTES == 64
    if constexpr (sizeof(T) == 4) {
      return (Vec)_mm512_maskz_min_ps(0xFFFF, (__m512)high, _mm512_maskz_max_ps(0xFFFF, (__m512)low, (__m512)x));
    } else {
      return (Vec)_mm512_maskz_min_pd(0xFF, (__m512d)high, _mm512_maskz_max_pd(0xFF, (__m512d)low, (__m512d)x));
    }
#elif WEFT_VECTOR_BYTES == 32
    if constexpr (sizeof(T) == 4) {
      return (Vec)_mm256_min_ps((__m256)high, _mm256_max_ps((__m256)low, (__m256)x));
    } else {
      return (Vec)_mm256_min_pd((__m256d)high, _mm256_max_pd((__m256d)low, (__m256d)x));
    }
#else
    x = x < low ? low : x;
    return x > high ? high : x;
#endif
  }

  // exp to about one unit in the last place; inf above the range, the smallest normal number below it. Cody and Waite's
  // reduction x = n ln 2 + r, then Cephes' approximations on |r| <= ln(2)/2. NaN passes the clamp, reaches r and stays.
  static WEFT_INLINE Vec exp(Vec x) {
    constexpr bool single = sizeof(T) == 4;
    constexpr T low = single ? T(-87.3) : T(-708.3), high = single ? T(88.8) : T(709.8);
    x = clamp(x, broadcast(low), broadcast(high));
    // Adding 1.5 * 2^(mantissa bits) leaves round(x / ln 2) in the low bits.
    constexpr T magic = single ? T(12582912.0) : T(6755399441055744.0);
    const Vec shifted = x * T(1.44269504088896340736) + magic;
    const Vec n = shifted - magic;
    constexpr int mantissa = single ? 23 : 52;
    constexpr typename Types<T>::Bits bias = single ? 127 : 1023;
    const Vec power = (Vec)(((Int)shifted + bias) << mantissa);
    if constexpr (single) {
      const Vec r = (x - n * T(0.693359375)) + n * T(2.12194440e-4);
      Vec p = r * T(1.9875691500e-4) + T(1.3981999507e-3);
      p = p * r + T(8.3334519073e-3);
      p = p * r + T(4.1665795894e-2);
      p = p * r + T(1.6666665459e-1);
      p = p * r + T(5.0000001201e-1);
      return (p * (r * r) + r + T(1)) * power;
    } else {
      const Vec r = (x - n * T(6.93145751953125e-1)) - n * T(1.42860682030941723212e-6);
      const Vec rr = r * r;
      const Vec p =
          r * ((rr * T(1.26177193074810590878e-4) + T(3.02994407707441961300e-2)) * rr + T(9.99999999999999999910e-1));
      const Vec q =
          ((rr * T(3.00198505138664455042e-6) + T(2.52448340349684104192e-3)) * rr + T(2.27265548208155028766e-1)) *
              rr +
          T(2);
      return (T(1) + T(2) * (p / (q - p))) * power;
    }
  }

  static WEFT_INLINE Vec sigmoid(Vec x) {
    return T(1) / (T(1) + exp(-x));
  }

  // Near 0 a polynomial, because 1 - 2 / (exp(2x) + 1) cancels there and would lose the relative accuracy.
  static WEFT_INLINE Vec tanh(Vec x) {
    const Int sign = (Int)x & (Int)broadcast(T(-0.0));
    const Vec size = (Vec)((Int)x ^ sign);
    const Vec large = (Vec)((Int)(T(1) - T(2) / (exp(size + size) + T(1))) | sign);
    const Vec z = x * x;
    Vec small;
    if constexpr (sizeof(T) == 4) {
      Vec p = z * T(-5.70498872745e-3) + T(2.06390887954e-2);
      p = p * z - T(5.37397155531e-2);
      p = p * z + T(1.33314422036e-1);
      p = p * z - T(3.33332819422e-1);
      small = (p * z) * x + x;
    } else {
      const Vec p = (z * T(-9.64399179425052238628e-1) - T(9.92877231001918586564e1)) * z - T(1.61468768441708447952e3);
      const Vec q =
          ((z + T(1.12811678491632931402e2)) * z + T(2.23548839060100448583e3)) * z + T(4.84406305325125486048e3);
      small = (p / q) * z * x + x;
    }
    return size < T(0.625) ? small : large;
  }

  // As torch: NaN stays NaN.
  static WEFT_INLINE Vec relu(Vec x) {
    return x < T(0) ? Vec{} : x;
  }
};

// What lies in memory, and the vectors it is computed in: fp32, for doubles fp64. Any alignment; of n elements, n >= 1,
// the lanes beyond are zero, or left alone. Half types are rounded to nearest.
//
// For work element by element there are groups of kVectors whole vectors, in the order of the type's own that costs
// least. reorder() brings rows into that order and back.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <typename E>
struct Element {
  using Compute = E;
  using S = Simd<E>;
  static WEFT_INLINE typename S::Vec load(const E* p, int64_t n) { return S::load(p, n); }
  static WEFT_INLINE void store(E* p, typename S::Vec v, int64_t n) { S::store(p, v, n); }

  static constexpr int kVectors = 1;
  static WEFT_INLINE void load_group(const E* p, typename S::Vec (&v)[1]) { v[0] = S::load(p, S::kLanes); }
  static WEFT_INLINE void store_group(E* p, const typename S::Vec (&v)[1]) { S::store(p, v[0], S::kLanes); }
};

template <typename E, typename Convert>
struct SixteenBits {
  using Compute = float;
  using S = Simd<float>;
  typedef uint16_t Bits __attribute__((vector_size(WEFT_VECTOR_BYTES / 2)));
  static WEFT_INLINE typename S::Vec load(const E* p, int64_t n) {
    Bits bits{};
    if (n >= S::kLanes) {
      __builtin_memcpy(&bits, p, sizeof(bits));
    } else {
#if WEFT_VECTOR_BYTES == 64
      bits = (Bits)_mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), p);
#else
      // In registers: a load of what several stores have left would wait for them.
      Words words{};
      if (n >= 4) __builtin_memcpy(&words[0], p, 8);
      words[n / 4] = few(p + n / 4 * 4, n % 4);
      bits = (Bits)words;
#endif
    }
    return Convert::widen(bits);
  }
  static WEFT_INLINE void store(E* p, typename S::Vec v, int64_t n) {
    const Bits bits = Convert::narrow(v);
    if (n >= S::kLanes) {
      __builtin_memcpy(p, &bits, sizeof(bits));
    } else {
#if WEFT_VECTOR_BYTES == 64
      _mm256_mask_storeu_epi16(p, __mmask16((1u << n) - 1), (__m256i)bits);
#else
      const Words words = (Words)bits;
      if (n >= 4) __builtin_memcpy(p, &words[0], 8);
      uint64_t rest = words[n / 4];
      for (int64_t i = n / 4 * 4; i < n; ++i, rest >>= 16) p[i].bits = uint16_t(rest);
#endif
    }
  }

  static constexpr int kVectors = 1;
  static WEFT_INLINE void load_group(const E* p, typename S::Vec (&v)[1]) {
    v[0] = load(p, S::kLanes);
  }
  static WEFT_INLINE void store_group(E* p, const typename S::Vec (&v)[1]) {
    store(p, v[0], S::kLanes);
  }

 private:
  typedef uint64_t Words __attribute__((vector_size(WEFT_VECTOR_BYTES / 2)));
  static WEFT_INLINE uint64_t few(const E* p, int64_t n) {
    uint64_t word = 0;
    for (int64_t i = 0; i < n; ++i) word |= uint64_t(p[i].bits) << 16 * i;
    return word;
  }
};

struct ConvertBFloat16 {
  using S = Simd<float>;
  typedef uint16_t Bits __attribute__((vector_size(WEFT_VECTOR_BYTES / 2)));
  typedef uint32_t Words __attribute__((vector_size(WEFT_VECTOR_BYTES)));
  static WEFT_INLINE S::Vec widen(Bits bits) {
#if WEFT_VECTOR_BYTES == 64
    return (S::Vec)((Words)_mm512_maskz_cvtepu16_epi32(0xFFFF, (__m256i)bits) << 16);
#elif WEFT_VECTOR_BYTES == 32
    return (S::Vec)((Words)_mm256_cvtepu16_epi32((__m128i)bits) << 16);
#else
    return (S::Vec)(__builtin_convertvector(bits, Words) << 16);
#endif
  }
  // In the upper half of each lane; what is below is anything.
  static WEFT_INLINE Words rounded(S::Vec v) {
    const Words x = (Words)v, sum = x + (((x >> 16) & 1) + 0x7fff);
    return v == v ? sum : Words{} + 0x7fc00000;
  }
  static WEFT_INLINE Bits narrow(S::Vec v) {
    const Words result = rounded(v) >> 16;
#if WEFT_VECTOR_BYTES == 64
    return (Bits)_mm512_maskz_cvtepi32_epi16(0xFFFF, (__m512i)result);
#elif WEFT_VECTOR_BYTES == 32
    const __m256i words = (__m256i)result;
    return (Bits)_mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
#else
    return __builtin_convertvector(result, Bits);
#endif
  }
};

struct ConvertHalf {
  using S = Simd<float>;
  typedef uint16_t Bits __attribute__((vector_size(WEFT_VECTOR_BYTES / 2)));
  typedef uint32_t Words __attribute__((vector_size(WEFT_VECTOR_BYTES)));
  static WEFT_INLINE S::Vec widen(Bits bits) {
#if WEFT_VECTOR_BYTES == 64
    return (S::Vec)_mm512_maskz_cvtph_ps(0xFFFF, (__m256i)bits);
#elif WEFT_VECTOR_BYTES == 32
    return (S::Vec)_mm256_cvtph_ps((__m128i)bits);
#else
    const Words x = __builtin_convertvector(bits, Words), size = (x & 0x7fff) << 13, sign = (x & 0x8000) << 16;
    // 2^112 is the difference of the exponents' biases; what is subnormal becomes normal. Infinity and NaN have the
    // largest exponent here and there.
    const Words finite = (Words)((S::Vec)size * 0x1p112f);
    return (S::Vec)(sign | (size >= (0x7c00u << 13) ? size | 0x7f800000 : finite));
#endif
  }
  static WEFT_INLINE Bits narrow(S::Vec v) {
#if WEFT_VECTOR_BYTES == 64
    return (Bits)_mm512_maskz_cvtps_ph(0xFFFF, (__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif WEFT_VECTOR_BYTES == 32
    return (Bits)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const Words x = (Words)v, size = x & 0x7fffffff, sign = (x >> 16) & 0x8000;
    const Words normal = (size - (112u << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
    // The last bit of 0.5 is worth as much as a subnormal's.
    const Words subnormal = (Words)((S::Vec)size + 0.5f) - 0x3f000000;
    const Words finite = size < 0x38800000 ? subnormal : normal;
    const Words largest = size > 0x7f800000 ? Words{} + 0x7e00 : Words{} + 0x7c00;
    return __builtin_convertvector(sign | (size >= 0x47800000 ? largest : finite), Bits);
#endif
  }
};

template <>
struct Element<Half> : SixteenBits<Half, ConvertHalf> {};
// A group is the elements of even place, then those of odd place: in the lower and upper halves of a vector's lanes, so
// that nothing moves from lane to lane.
template <>
struct Element<BFloat16> : SixteenBits<BFloat16, ConvertBFloat16> {
  using Words = ConvertBFloat16::Words;
  static constexpr int kVectors = 2;
  static WEFT_INLINE void load_group(const BFloat16* p, S::Vec (&v)[2]) {
    Words both;
    __builtin_memcpy(&both, p, sizeof(both));
    v[0] = (S::Vec)(both << 16);
    v[1] = (S::Vec)(both & 0xffff0000);
  }
  static WEFT_INLINE void store_group(BFloat16* p, const S::Vec (&v)[2]) {
    const Words even = ConvertBFloat16::rounded(v[0]) >> 16, odd = ConvertBFloat16::rounded(v[1]) & 0xffff0000;
    const Words both = even | odd;
    __builtin_memcpy(p, &both, sizeof(both));
  }
};

// Rows of whole groups from the order of memory to that of groups, or back.
template <typename E, bool kToGroups>
WEFT_INLINE void reorder(typename Element<E>::Compute* row, int64_t count) {
  constexpr int kVectors = Element<E>::kVectors, kLanes = Simd<typename Element<E>::Compute>::kLanes;
  if constexpr (kVectors == 2) {
    for (int64_t j = 0; j + 2 * kLanes <= count; j += 2 * kLanes) {
      typename Element<E>::Compute group[2 * kLanes];
      for (int i = 0; i < 2 * kLanes; ++i) {
        const int grouped = i % 2 * kLanes + i / 2;
        group[kToGroups ? grouped : i] = row[j + (kToGroups ? i : grouped)];
      }
      for (int i = 0; i < 2 * kLanes; ++i) row[j + i] = group[i];
    }
  }
}

WEFT_INLINE int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}
WEFT_INLINE int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// ---- The register block

// Rows of the register block for NV vectors per row: NV * rows accumulators, the NV weights and a broadcast must fit.
constexpr int max_rows(int nv) {
#if WEFT_REGISTERS == 32
  return nv <= 3 ? 8 : 6;
#else
  return nv == 1 ? 8 : nv == 2 ? 6 : nv == 3 ? 4 : 3;
#endif
}

template <typename T>
WEFT_INLINE int64_t panels_of(int64_t H) {
  return ceil_div(H, Simd<T>::kLanes);
}

// Calls f.template operator()<rows>(first_row) for equal blocks of at most MAX rows.
template <int MAX, typename F>
WEFT_INLINE void dispatch_rows(int64_t rows, int64_t first, F& f) {
  if constexpr (MAX == 1) {
    f.template operator()<1>(first);
  } else if (rows == MAX) {
    f.template operator()<MAX>(first);
  } else {
    dispatch_rows<MAX - 1>(rows, first, f);
  }
}

template <int MAX, typename F>
WEFT_INLINE void row_blocks(int64_t rows, F f) {
  const int64_t blocks = ceil_div(rows, MAX);
  for (int64_t i = 0, first = 0; i < blocks; ++i) {
    const int64_t count = ceil_div(rows - first, blocks - i);
    dispatch_rows<MAX>(count, first, f);
    first += count;
  }
}

// A row of a (rows, H) matrix to and from a padded row.
template <typename T>
WEFT_INLINE void copy_rows(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows, int64_t count) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < count; ++j) to[r * to_stride + j] = from[r * from_stride + j];
  }
}

template <typename T>
WEFT_INLINE void fill_zero(T* p, int64_t count) {
  for (int64_t i = 0; i < count; ++i) p[i] = T(0);
}

}  // namespace
}  // namespace weft::cpu::WEFT_ISA
