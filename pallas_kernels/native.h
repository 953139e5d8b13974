// Shared by the CPU kernels: 16-lane vectors through the compiler's vector extension (AVX-512, AVX2, NEON, whatever the
// machine has), bfloat16 loads, a vector exp, and a parallel loop on XLA's own thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace jaxinfer {

namespace ffi = xla::ffi;

constexpr int kLanes = 16;
typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t IntVec __attribute__((vector_size(kLanes * sizeof(int32_t))));
typedef uint16_t HalfVec __attribute__((vector_size(kLanes * sizeof(uint16_t))));
// The same in memory, anywhere. (A memcpy into a vector makes GCC go through the stack in small pieces.)
typedef float VecInMemory __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));
typedef uint16_t HalfVecInMemory __attribute__((vector_size(kLanes * sizeof(uint16_t)), aligned(2), may_alias));

typedef uint8_t ByteVecInMemory __attribute__((vector_size(kLanes), aligned(1), may_alias));
typedef int8_t SignedByteVecInMemory __attribute__((vector_size(kLanes), aligned(1), may_alias));

struct BF16 {
  uint16_t bits;
};

struct F16 {
  uint16_t bits;
};

inline Vec Load(const float* p) { return *reinterpret_cast<const VecInMemory*>(p); }

inline Vec Load(const BF16* p) {
  HalfVec half = *reinterpret_cast<const HalfVecInMemory*>(p);
  return (Vec)(__builtin_convertvector(half, IntVec) << 16);
}

// Exact, without a float32 denormal on the way: threads may flush them to zero.
inline Vec Load(const F16* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  IntVec bits = __builtin_convertvector(*reinterpret_cast<const HalfVecInMemory*>(p), IntVec);
  IntVec magnitude = bits & 0x7fff;
  IntVec wide = (magnitude << 13) + (112 << 23);
  wide = magnitude >= 0x7c00 ? wide | 0x7f800000 : wide;  // infinities and NaN
  Vec small = __builtin_convertvector(magnitude, Vec) * 0x1p-24f;
  wide = magnitude < 0x400 ? (IntVec)small : wide;
  return (Vec)(wide | ((bits & 0x8000) << 16));
#endif
}

// Sixteen bytes as integers. (GCC 12 converts a vector of bytes piece by piece.)
inline IntVec Codes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (IntVec)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector(*reinterpret_cast<const ByteVecInMemory*>(p), IntVec);
#endif
}

inline IntVec Codes(const int8_t* p) {
#if defined(__AVX512F__)
  return (IntVec)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector(*reinterpret_cast<const SignedByteVecInMemory*>(p), IntVec);
#endif
}

// table[index % 16] in each lane.
inline Vec Lookup(Vec table, IntVec index) {
#if defined(__AVX512F__)
  return (Vec)_mm512_permutexvar_ps((__m512i)index, (__m512)table);
#elif defined(__clang__)
  Vec result;
  for (int i = 0; i < kLanes; ++i) result[i] = table[index[i] & 15];
  return result;
#else
  return __builtin_shuffle(table, index);
#endif
}

inline void Store(float* p, Vec v) { *reinterpret_cast<VecInMemory*>(p) = v; }

inline void Store(BF16* p, Vec v) {
  // Round to nearest, ties to even; a NaN stays a NaN.
  IntVec bits = (IntVec)v;
  IntVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  IntVec nan = v != v;
  rounded = nan ? IntVec{} + 0x7fc0 : rounded;
  *reinterpret_cast<HalfVecInMemory*>(p) = __builtin_convertvector(rounded, HalfVec);
}

inline Vec Splat(float x) { return Vec{} + x; }

typedef float HalfOfVec __attribute__((vector_size(32)));
typedef float QuarterOfVec __attribute__((vector_size(16)));
typedef float QuarterInMemory __attribute__((vector_size(16), aligned(4), may_alias));

inline QuarterOfVec LoadQuarter(const float* p) { return *reinterpret_cast<const QuarterInMemory*>(p); }
inline void Store(float* p, QuarterOfVec v) { *reinterpret_cast<QuarterInMemory*>(p) = v; }

// The sums of four vectors. Pairs of lanes are added while vectors are woven together, so it costs little more than one sum.
inline QuarterOfVec Sums(Vec a, Vec b, Vec c, Vec d) {
#define JAXINFER_WEAVE2(x, y, i)                                                                                   \
  __builtin_shufflevector(x, y, i, i + 16, i + 2, i + 18, i + 4, i + 20, i + 6, i + 22, i + 8, i + 24, i + 10, i + 26, \
                          i + 12, i + 28, i + 14, i + 30)
#define JAXINFER_WEAVE4(x, y, i)                                                                                        \
  __builtin_shufflevector(x, y, i, i + 1, i + 16, i + 17, i + 4, i + 5, i + 20, i + 21, i + 8, i + 9, i + 24, i + 25, \
                          i + 12, i + 13, i + 28, i + 29)
  Vec ab = JAXINFER_WEAVE2(a, b, 0) + JAXINFER_WEAVE2(a, b, 1);
  Vec cd = JAXINFER_WEAVE2(c, d, 0) + JAXINFER_WEAVE2(c, d, 1);
  Vec abcd = JAXINFER_WEAVE4(ab, cd, 0) + JAXINFER_WEAVE4(ab, cd, 2);
#undef JAXINFER_WEAVE2
#undef JAXINFER_WEAVE4
  HalfOfVec half = __builtin_shufflevector(abcd, abcd, 0, 1, 2, 3, 4, 5, 6, 7) +
                   __builtin_shufflevector(abcd, abcd, 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
}

// In the same order as Sums.
inline float Sum(Vec v) { return Sums(v, v, v, v)[0]; }

// to[j][i] = from[i][j] for 16 x 16 values: four rounds of weaving row i with row i + 8.
inline void Turn(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  Vec rows[kLanes], woven[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) rows[i] = Load(from + i * from_stride);
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      Vec a = rows[i], b = rows[i + kLanes / 2];
      woven[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      woven[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = woven[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) Store(to + i * to_stride, rows[i]);
}

inline Vec Max(Vec a, Vec b) { return a > b ? a : b; }

inline float Max(Vec v) {
  HalfOfVec a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
            b = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  a = a > b ? a : b;
  QuarterOfVec c = __builtin_shufflevector(a, a, 0, 1, 2, 3), d = __builtin_shufflevector(a, a, 4, 5, 6, 7);
  c = c > d ? c : d;
  return std::max(std::max(c[0], c[2]), std::max(c[1], c[3]));
}

// exp(x) for x <= 0, relative error below 2e-7: 2^n times a polynomial (Cephes' expf). Below -87 it is 0.
inline Vec Exp(Vec x) {
  IntVec tiny = x < -87.0f;
  x = tiny ? Splat(-87.0f) : x;
  Vec scaled = x * 1.44269504088896341f - 0.5f;  // x <= 0, so truncation rounds to nearest
  IntVec n = __builtin_convertvector(scaled, IntVec);
  Vec nf = __builtin_convertvector(n, Vec);
  Vec r = x - nf * 0.693359375f + nf * 2.12194440e-4f;
  Vec p = Splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Vec result = p * (Vec)((n + 127) << 23);
  return tiny ? Vec{} : result;
}

// Calls body(i) for every i in [0, items), on the pool's threads and this one. Items are taken one by one, so they may differ
// in cost. A task that the pool starts only after all items are taken returns at once, and `body` is not touched.
template <class Body>
void ParallelFor(ffi::ThreadPool& pool, int64_t items, const Body& body) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto state = std::make_shared<State>();
  auto run = [state, items, &body] {
    for (int64_t i; (i = state->next.fetch_add(1)) < items;) {
      body(i);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t helper = std::min(pool.num_threads(), items) - 1; helper > 0; --helper) pool.Schedule(std::decay_t<decltype(run)>(run));
  run();
  while (state->done.load(std::memory_order_acquire) < items) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

// A buffer of the calling thread that only grows.
template <class T, int kWhich>
T* Scratch(int64_t count) {
  static thread_local std::vector<T> buffer;
  if (static_cast<int64_t>(buffer.size()) < count) buffer.resize(count);
  return buffer.data();
}

}  // namespace jaxinfer
