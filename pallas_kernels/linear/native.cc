// y[M, N] = x[M, K] w[N, K]^T with float32 accumulation, for float32 and bfloat16 weights in the checkpoint's row-major layout.
//
// With few rows the weights are read once at memory speed. With many, four rows of weights are widened to float32 once and
// meet all rows of x from the cache. A tile keeps MR x NR sums of 16 lanes in registers and adds the lanes up at its end.
#include "native.h"

namespace jaxinfer {
namespace {

constexpr int kRows = 4;        // rows of w in a tile
constexpr int kMaxX = 6;        // rows of x in a tile: 24 sums, 4 weights, 1 x fill 29 of 32 registers
constexpr int64_t kGrain = 64;  // rows of w that a thread takes at once

template <int MR, int NR, class W>
inline void Tile(const float* x, const W* w, int64_t k, float* y, int64_t ldy) {
  Vec sums[MR][NR] = {};
  for (int64_t i = 0; i < k; i += kLanes) {
    Vec weights[NR];
#pragma GCC unroll 8
    for (int r = 0; r < NR; ++r) weights[r] = Load(w + r * k + i);
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      Vec value = Load(x + m * k + i);
#pragma GCC unroll 8
      for (int r = 0; r < NR; ++r) sums[m][r] += value * weights[r];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
    for (int r = 0; r < NR; ++r) y[m * ldy + r] = Sum(sums[m][r]);
}

template <int NR, class W>
void Rows(const float* x, int64_t m, const W* w, int64_t k, float* y, int64_t ldy) {
  const int64_t tiles = (m + kMaxX - 1) / kMaxX;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t first = m * t / tiles, count = m * (t + 1) / tiles - first;  // equal tiles, not one thin one
    const float* xt = x + first * k;
    float* yt = y + first * ldy;
    switch (count) {
      case 1: Tile<1, NR>(xt, w, k, yt, ldy); break;
      case 2: Tile<2, NR>(xt, w, k, yt, ldy); break;
      case 3: Tile<3, NR>(xt, w, k, yt, ldy); break;
      case 4: Tile<4, NR>(xt, w, k, yt, ldy); break;
      case 5: Tile<5, NR>(xt, w, k, yt, ldy); break;
      default: Tile<6, NR>(xt, w, k, yt, ldy); break;
    }
  }
}

template <class W>
void Multiply(ffi::ThreadPool& pool, const float* x, const W* w, float* y, int64_t m, int64_t n, int64_t k) {
  // Blocks of x that stay in the second-level cache while a thread's rows of w pass by.
  const int64_t block = std::max<int64_t>(kMaxX, (192 << 10) / (k * 4) / kMaxX * kMaxX);
  ParallelFor(pool, (n + kGrain - 1) / kGrain, [&](int64_t item) {
    const int64_t end = std::min(n, (item + 1) * kGrain);
    for (int64_t mb = 0; mb < m; mb += block) {
      const int64_t rows = std::min(block, m - mb);
      const float* xb = x + mb * k;
      float* yb = y + mb * n;
      for (int64_t r = item * kGrain; r < end; r += kRows) {
        const W* wr = w + r * k;
        if (end - r < kRows) {
          for (int64_t i = r; i < end; ++i) Rows<1>(xb, rows, w + i * k, k, yb + i, n);
        } else if (sizeof(W) < sizeof(float) && rows > kMaxX) {
          float* wide = Scratch<float, 0>(kRows * k);
          for (int64_t i = 0; i < kRows * k; i += kLanes) Store(wide + i, Load(wr + i));
          Rows<kRows>(xb, rows, wide, k, yb + r, n);
        } else {
          Rows<kRows>(xb, rows, wr, k, yb + r, n);
        }
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
