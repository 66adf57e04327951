// The CPU kernels of zvc_compress and zvc_decompress: included once per instruction set, with WEFT_ISA and
// WEFT_VECTOR_BYTES as common/cpu/simd-inl.h has them, and its rule on the standard library's templates.
#include <cstdint>

#include "offload/cpu/zvc_kernels.h"

namespace weft::cpu::WEFT_ISA {
namespace {

#define WEFT_INLINE inline __attribute__((always_inline))

// What one vector register does: the bits of kLanes elements, their non-zeros side by side, and the way back.
template <typename T>
struct Zvc;

#if WEFT_VECTOR_BYTES == 64

// The forms without a mask draw a false warning from GCC 12's header.
WEFT_INLINE __m512i widen(const uint16_t* p) {
  return _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
WEFT_INLINE __mmask16 first_lanes(int64_t n) {
  return n >= 16 ? 0xffff : __mmask16((1u << n) - 1);
}

template <>
struct Zvc<uint32_t> {
  static constexpr int kLanes = 16;
  static WEFT_INLINE uint32_t bits(const uint32_t* x) {
    const __m512i v = _mm512_loadu_si512(x);
    return _mm512_test_epi32_mask(v, v);
  }
  static WEFT_INLINE void pack(const uint32_t* x, uint32_t bits, uint32_t* values, int64_t room) {
    const __m512i v = _mm512_maskz_compress_epi32(__mmask16(bits), _mm512_loadu_si512(x));
    _mm512_mask_storeu_epi32(values, first_lanes(room), v);
  }
  static WEFT_INLINE void expand(uint32_t bits, const uint32_t* values, int64_t available, uint32_t* out) {
    const __m512i v = _mm512_maskz_loadu_epi32(first_lanes(available), values);
    _mm512_storeu_si512(out, _mm512_maskz_expand_epi32(__mmask16(bits), v));
  }
};

template <>
struct Zvc<uint16_t> {
  static constexpr int kLanes = 16;
  static WEFT_INLINE uint32_t bits(const uint16_t* x) {
    const __m512i v = widen(x);
    return _mm512_test_epi32_mask(v, v);
  }
  static WEFT_INLINE void pack(const uint16_t* x, uint32_t bits, uint16_t* values, int64_t room) {
    const __m512i v = _mm512_maskz_compress_epi32(__mmask16(bits), widen(x));
    _mm256_mask_storeu_epi16(values, first_lanes(room), _mm512_maskz_cvtepi32_epi16(0xffff, v));
  }
  static WEFT_INLINE void expand(uint32_t bits, const uint16_t* values, int64_t available, uint16_t* out) {
    const __m256i narrow = _mm256_maskz_loadu_epi16(first_lanes(available), values);
    const __m512i v = _mm512_maskz_expand_epi32(__mmask16(bits), _mm512_maskz_cvtepu16_epi32(0xffff, narrow));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_maskz_cvtepi32_epi16(0xffff, v));
  }
};

#elif WEFT_VECTOR_BYTES == 32

// For the bits of eight elements: where the i-th non-zero lies, and which non-zero an element is. As indices of 4-byte
// lanes, and as pairs of bytes for a shuffle, where 0x80 gives zero.
struct Tables {
  alignas(16) uint8_t pack[256][8], expand[256][8], pack_bytes[256][16], expand_bytes[256][16];
};
constexpr Tables tables() {
  Tables t{};
  for (int bits = 0; bits < 256; ++bits) {
    int count = 0;
    for (int i = 0; i < 8; ++i) {
      const bool set = bits >> i & 1;
      t.expand[bits][i] = uint8_t(count);
      t.expand_bytes[bits][2 * i] = set ? uint8_t(2 * count) : 0x80;
      t.expand_bytes[bits][2 * i + 1] = set ? uint8_t(2 * count + 1) : 0x80;
      if (!set) continue;
      t.pack[bits][count] = uint8_t(i);
      t.pack_bytes[bits][2 * count] = uint8_t(2 * i);
      t.pack_bytes[bits][2 * count + 1] = uint8_t(2 * i + 1);
      ++count;
    }
  }
  return t;
}
constexpr Tables kTables = tables();

template <typename T>
WEFT_INLINE void pack_some(const T* x, uint32_t bits, T* values) {
  for (int k = 0; bits != 0; bits &= bits - 1) values[k++] = x[__builtin_ctz(bits)];
}
template <typename T>
WEFT_INLINE void expand_some(uint32_t bits, const T* values, T* out) {
  for (int i = 0, k = 0; i < 8; ++i) out[i] = bits >> i & 1 ? values[k++] : T(0);
}

template <>
struct Zvc<uint32_t> {
  static constexpr int kLanes = 8;
  static WEFT_INLINE __m256i load(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static WEFT_INLINE __m256i indices(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static WEFT_INLINE uint32_t bits(const uint32_t* x) {
    const __m256i zero = _mm256_cmpeq_epi32(load(x), _mm256_setzero_si256());
    return ~uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(zero))) & 0xff;
  }
  static WEFT_INLINE void pack(const uint32_t* x, uint32_t bits, uint32_t* values, int64_t room) {
    if (room < kLanes) return pack_some(x, bits, values);
    const __m256i v = _mm256_permutevar8x32_epi32(load(x), indices(kTables.pack[bits]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values), v);
  }
  static WEFT_INLINE void expand(uint32_t bits, const uint32_t* values, int64_t available, uint32_t* out) {
    if (available < kLanes) return expand_some(bits, values, out);
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(bits)), lane), lane);
    const __m256i v = _mm256_permutevar8x32_epi32(load(values), indices(kTables.expand[bits]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_and_si256(v, set));
  }
};

template <>
struct Zvc<uint16_t> {
  static constexpr int kLanes = 8;
  static WEFT_INLINE __m128i load(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static WEFT_INLINE uint32_t bits(const uint16_t* x) {
    const __m128i zero = _mm_cmpeq_epi16(load(x), _mm_setzero_si128());
    return ~uint32_t(_mm_movemask_epi8(_mm_packs_epi16(zero, _mm_setzero_si128()))) & 0xff;
  }
  static WEFT_INLINE void pack(const uint16_t* x, uint32_t bits, uint16_t* values, int64_t room) {
    if (room < kLanes) return pack_some(x, bits, values);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values), _mm_shuffle_epi8(load(x), load(kTables.pack_bytes[bits])));
  }
  static WEFT_INLINE void expand(uint32_t bits, const uint16_t* values, int64_t available, uint16_t* out) {
    if (available < kLanes) return expand_some(bits, values, out);
    const __m128i v = _mm_shuffle_epi8(load(values), load(kTables.expand_bytes[bits]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), v);
  }
};

#else

template <typename T>
struct Zvc {
  static constexpr int kLanes = 8;
  static WEFT_INLINE uint32_t bits(const T* x) {
    uint32_t bits = 0;
    for (int i = 0; i < kLanes; ++i) bits |= uint32_t(x[i] != 0) << i;
    return bits;
  }
  static WEFT_INLINE void pack(const T* x, uint32_t bits, T* values, int64_t) {
    for (int k = 0; bits != 0; bits &= bits - 1) values[k++] = x[__builtin_ctz(bits)];
  }
  static WEFT_INLINE void expand(uint32_t bits, const T* values, int64_t, T* out) {
    for (int i = 0, k = 0; i < kLanes; ++i) out[i] = bits >> i & 1 ? values[k++] : T(0);
  }
};

#endif

template <typename T>
int64_t count(const T* x, int64_t n) {
  constexpr int kLanes = Zvc<T>::kLanes;
  int64_t total = 0, i = 0;
  for (; i + kLanes <= n; i += kLanes) total += __builtin_popcount(Zvc<T>::bits(x + i));
  for (; i < n; ++i) total += x[i] != 0;
  return total;
}

template <typename T>
void pack(const T* x, int64_t n, uint32_t* mask, T* values, int64_t room) {
  constexpr int kLanes = Zvc<T>::kLanes;
  T* const end = values + room;
  for (; n >= 32; n -= 32, x += 32) {
    uint32_t word = 0;
    for (int i = 0; i < 32; i += kLanes) {
      const uint32_t bits = Zvc<T>::bits(x + i);
      Zvc<T>::pack(x + i, bits, values, end - values);
      values += __builtin_popcount(bits);
      word |= bits << i;
    }
    *mask++ = word;
  }
  if (n == 0) return;
  uint32_t word = 0;
  for (int i = 0; i < n; ++i) {
    if (x[i] == 0) continue;
    *values++ = x[i];
    word |= uint32_t(1) << i;
  }
  *mask = word;
}

template <typename T>
void expand(const uint32_t* mask, int64_t n, const T* values, int64_t available, T* out) {
  constexpr int kLanes = Zvc<T>::kLanes;
  const T* const end = values + available;
  for (; n >= 32; n -= 32, out += 32) {
    const uint32_t word = *mask++;
    for (int i = 0; i < 32; i += kLanes) {
      const uint32_t bits = word >> i & (kLanes == 16 ? 0xffff : 0xff);
      Zvc<T>::expand(bits, values, end - values, out + i);
      values += __builtin_popcount(bits);
    }
  }
  for (int i = 0; i < n; ++i) out[i] = *mask >> i & 1 ? *values++ : T(0);
}

template <typename T>
constexpr ZvcKernels<T> kZvcKernels = {count<T>, pack<T>, expand<T>};

}  // namespace

const ZvcTables zvc_kernels = {kZvcKernels<uint16_t>, kZvcKernels<uint32_t>};

}  // namespace weft::cpu::WEFT_ISA
