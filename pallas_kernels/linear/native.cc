// y[M, N] = x[M, K] w[N, K]^T with float32 accumulation, for float32 and bfloat16 weights in the checkpoint's row-major layout.
//
// A thread takes kGrain rows of w at a time. With few rows of x it reads them once, at memory speed. With many it widens them to
// float32 first; they then stay in the second-level cache, while a tile of x stays in the first, for K in blocks that
// let it. The order in which a sum is made does not depend on how many rows there are. A tile keeps MR x NR sums of 16 lanes in registers and adds the lanes up at its end.
#include "native.h"

namespace jaxinfer {
namespace {

constexpr int kRows = 4;          // rows of w in a tile
constexpr int kMaxX = 6;          // rows of x in a tile: 24 sums, 4 weights, 1 x fill 29 of 32 registers
constexpr int kTall = 8;          // rows of x in a tile with 2 rows of w: more products for each weight widened on the way
constexpr int kThin = 32;         // up to so many rows of x, weights are widened on the way, else first
constexpr int kAhead = 8;         // rows of w between use and prefetch
constexpr int64_t kGrain = 64;    // rows of w that a thread takes at once
constexpr int64_t kDepth = 768;   // of K in one pass: 6 rows of x and 4 of w are 30 KB

// Rows of x and w at strides ldx and ldw; adds to y when `add`.
// NR is 4, or 2 where MR is even, or 1.
template <int MR, int NR, class W>
inline void Tile(const float* x, int64_t ldx, const W* w, int64_t ldw, int64_t k, float* y, int64_t ldy, bool add) {
  Vec sums[MR][NR] = {};
  for (int64_t i = 0; i < k; i += kLanes) {
    Vec weights[NR];
#pragma GCC unroll 8
    for (int r = 0; r < NR; ++r) {
      weights[r] = Load(w + r * ldw + i);
      // Rows are too short for the processor to guess the next ones in time.
      __builtin_prefetch(w + (r + kAhead) * ldw + i);
    }
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      Vec value = Load(x + m * ldx + i);
#pragma GCC unroll 8
      for (int r = 0; r < NR; ++r) sums[m][r] += value * weights[r];
    }
  }
  auto put = [add](float* out, auto total) { *out = add ? total + *out : total; };
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
    float* out = y + m * ldy;
    if constexpr (NR == 4) {
      QuarterOfVec total = Sums(sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
      Store(out, add ? total + LoadQuarter(out) : total);
    } else if constexpr (NR == 2) {
      QuarterOfVec total = Sums(sums[m][0], sums[m][1], sums[m + 1][0], sums[m + 1][1]);
      put(out, total[0]), put(out + 1, total[1]), put(out + ldy, total[2]), put(out + ldy + 1, total[3]);
      ++m;
    } else {
      put(out, Sum(sums[m][0]));
    }
  }
}

template <int MR, class W>
void Columns(const float* x, int64_t ldx, const W* w, int64_t n, int64_t ldw, int64_t k, float* y, int64_t ldy, bool add) {
  constexpr int kWide = MR > kMaxX ? 2 : kRows;
  int64_t r = 0;
  for (; r + kWide <= n; r += kWide) Tile<MR, kWide>(x, ldx, w + r * ldw, ldw, k, y + r, ldy, add);
  for (; r < n; ++r) Tile<MR, 1>(x, ldx, w + r * ldw, ldw, k, y + r, ldy, add);
}

// m rows of x meet n rows of w: in tiles of kTall while whole ones are left and weights are narrow, then in equal tiles of at
// most kMaxX.
template <class W>
void Meet(const float* x, int64_t m, int64_t ldx, const W* w, int64_t n, int64_t ldw, int64_t k, float* y, int64_t ldy,
          bool add) {
  while (m >= kTall && (sizeof(W) < sizeof(float) || m == kTall)) {
    Columns<kTall>(x, ldx, w, n, ldw, k, y, ldy, add);
    x += kTall * ldx, y += kTall * ldy, m -= kTall;
  }
  const int64_t tiles = (m + kMaxX - 1) / kMaxX;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t first = m * t / tiles, count = m * (t + 1) / tiles - first;  // equal tiles, not one thin one
    const float* xt = x + first * ldx;
    float* yt = y + first * ldy;
    switch (count) {
      case 1: Columns<1>(xt, ldx, w, n, ldw, k, yt, ldy, add); break;
      case 2: Columns<2>(xt, ldx, w, n, ldw, k, yt, ldy, add); break;
      case 3: Columns<3>(xt, ldx, w, n, ldw, k, yt, ldy, add); break;
      case 4: Columns<4>(xt, ldx, w, n, ldw, k, yt, ldy, add); break;
      case 5: Columns<5>(xt, ldx, w, n, ldw, k, yt, ldy, add); break;
      default: Columns<6>(xt, ldx, w, n, ldw, k, yt, ldy, add); break;
    }
  }
}

template <class W>
void Multiply(ffi::ThreadPool& pool, const float* x, const W* w, float* y, int64_t m, int64_t n, int64_t k) {
  ParallelFor(pool, (n + kGrain - 1) / kGrain, [&](int64_t item) {
    const int64_t first = item * kGrain, rows = std::min(n - first, kGrain);
    const W* mine = w + first * k;
    for (int64_t depth = 0; depth < k; depth += kDepth) {
      const int64_t part = std::min(k - depth, kDepth);
      if (sizeof(W) < sizeof(float) && m > kThin) {
        float* wide = Scratch<float, 0>(kGrain * kDepth);
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t i = 0; i < part; i += kLanes) Store(wide + r * part + i, Load(mine + r * k + depth + i));
        Meet(x + depth, m, k, wide, rows, part, part, y + first, n, depth > 0);
      } else {
        Meet(x + depth, m, k, mine + depth, rows, k, part, y + first, n, depth > 0);
      }
    }
  });
}

ffi::Error Linear(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w,
                  ffi::Result<ffi::Buffer<ffi::F32>> y) {
  const int64_t m = x.dimensions()[0], k = x.dimensions()[1], n = w.dimensions()[0];
  if (k % kLanes != 0) return ffi::Error::InvalidArgument("linear: the inner dimension must be a multiple of 16");
  auto run = [&](auto* weights) { Multiply(pool, x.typed_data(), weights, y->typed_data(), m, n, k); };
  if (w.element_type() == ffi::BF16) run(static_cast<const jaxinfer::BF16*>(w.untyped_data()));
  else run(static_cast<const float*>(w.untyped_data()));
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxinfer

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_linear, jaxinfer::Linear,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
