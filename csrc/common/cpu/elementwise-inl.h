// Element-wise instructions on the CPU: a loop over n elements each, for one instruction set; included after
// common/cpu/simd-inl.h.
#pragma once
#include "common/cpu/simd-inl.h"

// GCC warns how lambdas would be called, before it has put all of them where they are used.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace weft::cpu::WEFT_ISA {
namespace {

template <typename T>
struct Elements {
  using S = Simd<T>;
  using Vec = typename S::Vec;

  // to[0, n) = op of a, b and c, of which it reads as many as it has operands; `to` has room for whole vectors. Op is
  // an enumeration made from elementwise.def; nothing happens for one of its other members.
  template <typename Op>
  static WEFT_INLINE void apply(Op op, T* to, const T* a, const T* b, const T* c, int64_t n) {
    const Vec one = S::broadcast(1), zero = Vec{};
    switch (op) {
#define WEFT_UNARY(name, Name, cpu, ...)         \
  case Op::k##Name:                              \
    unary(to, a, n, [=](Vec a) { return cpu; }); \
    break;
#define WEFT_SCALAR(name, Name, cpu, ...)                                                                  \
  case Op::k##Name:                                                                                        \
    for (int64_t j = 0; j < n; ++j) {                                                                      \
      to[j] = sizeof(T) == 4 ? T(__builtin_##cpu##f(static_cast<float>(a[j]))) : T(__builtin_##cpu(a[j])); \
    }                                                                                                      \
    break;
#define WEFT_BINARY(name, Name, cpu, ...)                   \
  case Op::k##Name:                                         \
    binary(to, a, b, n, [=](Vec a, Vec b) { return cpu; }); \
    break;
#define WEFT_TERNARY(name, Name, cpu, ...)                             \
  case Op::k##Name:                                                    \
    ternary(to, a, b, c, n, [=](Vec a, Vec b, Vec c) { return cpu; }); \
    break;
#include "common/elementwise.def"
      default:
        break;
    }
  }

  // To the precision of a narrower type.
  template <typename E>
  static WEFT_INLINE Vec rounded(Vec x) {
    if constexpr (sizeof(T) == 4) {
      E narrow[S::kLanes];
      Element<E>::store(narrow, x, S::kLanes);
      return Element<E>::load(narrow, S::kLanes);
    } else {
      return x;
    }
  }

 private:
  template <typename F>
  static WEFT_INLINE void unary(T* to, const T* a, int64_t n, F f) {
    for (int64_t j = 0; j < n; j += S::kLanes) S::store(to + j, f(S::load(a + j, n - j)), S::kLanes);
  }
  template <typename F>
  static WEFT_INLINE void binary(T* to, const T* a, const T* b, int64_t n, F f) {
    for (int64_t j = 0; j < n; j += S::kLanes) {
      S::store(to + j, f(S::load(a + j, n - j), S::load(b + j, n - j)), S::kLanes);
    }
  }
  template <typename F>
  static WEFT_INLINE void ternary(T* to, const T* a, const T* b, const T* c, int64_t n, F f) {
    for (int64_t j = 0; j < n; j += S::kLanes) {
      S::store(to + j, f(S::load(a + j, n - j), S::load(b + j, n - j), S::load(c + j, n - j)), S::kLanes);
    }
  }
};

}  // namespace
}  // namespace weft::cpu::WEFT_ISA
