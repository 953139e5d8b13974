// y[M, N] = x[M, K] w[N, K]^T with float32 accumulation, for float32 and bfloat16 weights in the checkpoint's row-major layout and for
// weights in blocks of 32 codes with a scale (see blocks.py); or the same for groups of rows of x, each with a matrix of its own.
//
// A thread takes kGrain rows of w at a time. With few rows of x it reads them once, at memory speed. With many it widens them to
// float32 first; they then stay in the second-level cache, while a tile of x stays in the first, for K in parts that
// let it. The order in which a sum is made does not depend on how many rows there are. A tile keeps MR x NR sums of 16 lanes in registers and adds the lanes up at its end.
#include "linear/products.h"

#include <string>

namespace jaxinfer {
namespace {

constexpr int kRows = 4;          // rows of w in a tile
constexpr int kMaxX = 6;          // rows of x in a tile: 24 sums, 4 weights, 1 x fill 29 of 32 registers
constexpr int kTall = 8;          // rows of x in a tile with 2 rows of w: more products for each weight widened on the way
constexpr int kThin = 32;         // up to so many rows of x, weights are widened on the way, else first
constexpr int64_t kGrain = 64;    // most rows of w that a thread takes at once
constexpr int64_t kDepth = 768;   // of K in one pass: 6 rows of x and 4 of w are 30 KB

// Kinds of weights. At(r, i): the same from row r and column i on. Load<h>(r, i): 16 values of row r from column i + h on, where i
// is a multiple of kStep and h < kStep. kAhead: rows between use and prefetch, about 9 KB.
template <class T>
struct Dense {
  static constexpr int kStep = kLanes;
  static constexpr int kAhead = 8;
  static constexpr bool kNarrow = sizeof(T) < sizeof(float);
  const T* data;
  int64_t stride;

  Dense At(int64_t r, int64_t i) const { return {data + r * stride + i, stride}; }
  template <int h>
  Vec Load(int64_t r, int64_t i) const { return jaxinfer::Load(data + r * stride + i); }
  void Prefetch(int64_t r, int64_t i) const { __builtin_prefetch(data + r * stride + i); }
};

// Blocks of 32 values in 16 bytes: value j in the low half of byte j, value 16 + j in the high half; code * scale + offset.
struct Nibbles {
  static constexpr int kStep = 2 * kLanes;
  static constexpr int kAhead = 32;
  static constexpr int kScales = 2;
  static constexpr bool kNarrow = true;
  const uint8_t* codes;
  int64_t stride;       // bytes in a row
  const float* scales;  // scale and offset of each block
  int64_t scale_stride;

  static constexpr int64_t RowBytes(int64_t k) { return k / 2; }
  Nibbles At(int64_t r, int64_t i) const {
    return {codes + r * stride + i / 2, stride, scales + r * scale_stride + i / kStep * kScales, scale_stride};
  }
  template <int h>
  Vec Load(int64_t r, int64_t i) const {
    const float* scale = scales + r * scale_stride + i / kStep * kScales;
    IntVec code = Codes(codes + r * stride + i / 2);
    constexpr Vec kCounting = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Vec values = kCounting * scale[0] + scale[1];
    return Lookup(values, h ? code >> 4 : code);
  }
  void Prefetch(int64_t r, int64_t i) const { __builtin_prefetch(codes + r * stride + i / 2); }
};

// Blocks of 32 values in 32 bytes: code * scale.
struct Bytes {
  static constexpr int kStep = 2 * kLanes;
  static constexpr int kAhead = 16;
  static constexpr int kScales = 1;
  static constexpr bool kNarrow = true;
  const int8_t* codes;
  int64_t stride;
  const float* scales;
  int64_t scale_stride;

  static constexpr int64_t RowBytes(int64_t k) { return k; }
  Bytes At(int64_t r, int64_t i) const {
    return {codes + r * stride + i, stride, scales + r * scale_stride + i / kStep, scale_stride};
  }
  template <int h>
  Vec Load(int64_t r, int64_t i) const {
    return __builtin_convertvector(Codes(codes + r * stride + i + h), Vec) * scales[r * scale_stride + i / kStep];
  }
  void Prefetch(int64_t r, int64_t i) const { __builtin_prefetch(codes + r * stride + i); }
};

template <int MR, int NR, int h, class W>
inline void Step(const float* x, int64_t ldx, const W& w, int64_t i, Vec (&sums)[MR][NR]) {
  Vec weights[NR];
#pragma GCC unroll 8
  for (int r = 0; r < NR; ++r) weights[r] = w.template Load<h>(r, i);
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m) {
    Vec value = Load(x + m * ldx + i + h);
#pragma GCC unroll 8
    for (int r = 0; r < NR; ++r) sums[m][r] += value * weights[r];
  }
}

// Adds to y when `add`. NR is 4, or 2 where MR is even, or 1.
template <int MR, int NR, class W>
inline void Tile(const float* x, int64_t ldx, const W& w, int64_t k, float* y, int64_t ldy, bool add) {
  Vec sums[MR][NR] = {};
  for (int64_t i = 0; i < k; i += W::kStep) {
    // Rows are too short for the processor to guess the next ones in time.
#pragma GCC unroll 8
    for (int r = 0; r < NR; ++r) w.Prefetch(r + W::kAhead, i);
    Step<MR, NR, 0>(x, ldx, w, i, sums);
    if constexpr (W::kStep > kLanes) Step<MR, NR, kLanes>(x, ldx, w, i, sums);
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
void Columns(const float* x, int64_t ldx, const W& w, int64_t n, int64_t k, float* y, int64_t ldy, bool add) {
  constexpr int kWide = MR > kMaxX ? 2 : kRows;
  int64_t r = 0;
  for (; r + kWide <= n; r += kWide) Tile<MR, kWide>(x, ldx, w.At(r, 0), k, y + r, ldy, add);
  for (; r < n; ++r) Tile<MR, 1>(x, ldx, w.At(r, 0), k, y + r, ldy, add);
}

// m rows of x meet n rows of w: in tiles of kTall while whole ones are left and weights are narrow, then in equal tiles of at
// most kMaxX.
template <class W>
void Meet(const float* x, int64_t m, int64_t ldx, const W& w, int64_t n, int64_t k, float* y, int64_t ldy, bool add) {
  while (m >= kTall && (W::kNarrow || m == kTall)) {
    Columns<kTall>(x, ldx, w, n, k, y, ldy, add);
    x += kTall * ldx, y += kTall * ldy, m -= kTall;
  }
  const int64_t tiles = (m + kMaxX - 1) / kMaxX;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t first = m * t / tiles, count = m * (t + 1) / tiles - first;  // equal tiles, not one thin one
    const float* xt = x + first * ldx;
    float* yt = y + first * ldy;
    switch (count) {
      case 1: Columns<1>(xt, ldx, w, n, k, yt, ldy, add); break;
      case 2: Columns<2>(xt, ldx, w, n, k, yt, ldy, add); break;
      case 3: Columns<3>(xt, ldx, w, n, k, yt, ldy, add); break;
      case 4: Columns<4>(xt, ldx, w, n, k, yt, ldy, add); break;
      case 5: Columns<5>(xt, ldx, w, n, k, yt, ldy, add); break;
      default: Columns<6>(xt, ldx, w, n, k, yt, ldy, add); break;
    }
  }
}

// `rows_from(matrix, first, count)` gives a thread its rows of w.
template <class RowsFrom>
void MultiplyBy(ffi::ThreadPool& pool, const float* x, RowsFrom rows_from, const std::vector<Group>& groups, float* y, int64_t n,
                int64_t k) {
  // As many shares for one thread as for another, each of whole tiles.
  const int64_t count = groups.size();
  const int64_t shares = (2 * pool.num_threads() + count - 1) / count;
  const int64_t items = ((n + kGrain - 1) / kGrain + shares - 1) / shares * shares;
  const int64_t grain = ((n + items - 1) / items + kRows - 1) / kRows * kRows;
  const int64_t per_group = (n + grain - 1) / grain;
  ParallelFor(pool, count * per_group, [&](int64_t item) {
    const Group& group = groups[item / per_group];
    const int64_t m = group.rows, first = item % per_group * grain, rows = std::min(n - first, grain);
    const float* my_x = x + group.first * k;
    float* my_y = y + group.first * n + first;
    const auto mine = rows_from(group.matrix, first, rows);
    using W = std::decay_t<decltype(mine)>;
    for (int64_t depth = 0; depth < k; depth += kDepth) {
      const int64_t part = std::min(k - depth, kDepth);
      const W here = mine.At(0, depth);
      if (W::kNarrow && m > kThin) {
        float* wide = Scratch<float, 0>(kGrain * kDepth);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t i = 0; i < part; i += W::kStep) {
            Store(wide + r * part + i, here.template Load<0>(r, i));
            if constexpr (W::kStep > kLanes) Store(wide + r * part + i + kLanes, here.template Load<kLanes>(r, i));
          }
        }
        Meet(my_x + depth, m, k, Dense<float>{wide, part}, rows, part, my_y, n, depth > 0);
      } else {
        Meet(my_x + depth, m, k, here, rows, part, my_y, n, depth > 0);
      }
    }
  });
}

template <class T>
void MultiplyPlain(ffi::ThreadPool& pool, const float* x, const Weights& w, const std::vector<Group>& groups, float* y) {
  const T* values = static_cast<const T*>(w.values);
  auto rows_from = [=, n = w.n, k = w.k](int64_t matrix, int64_t first, int64_t) {
    return Dense<T>{values + (matrix * n + first) * k, k};
  };
  MultiplyBy(pool, x, rows_from, groups, y, w.n, w.k);
}

// Stored scales as Nibbles and Bytes want them.
void Widen(const F16* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Store(to + i, Load(from + i));
  if (i < count) {
    F16 rest[kLanes] = {};
    std::copy(from + i, from + count, rest);
    Store(to + i, Load(rest));
  }
}

// (code - 8) * scale is code * scale plus an offset, with nothing rounded.
void Widen(const BF16* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(from[i].bits) << 16;
    float scale;
    std::memcpy(&scale, &bits, sizeof(scale));
    to[2 * i] = scale;
    to[2 * i + 1] = -8 * scale;
  }
}

// Each thread widens the scales of its rows first. Scale, kStored: the type of the stored ones, and how many a block has.
template <class W, class Code, class Scale, int kStored>
void MultiplyBlocks(ffi::ThreadPool& pool, const float* x, const Weights& w, const std::vector<Group>& groups, float* y) {
  const Code* codes = static_cast<const Code*>(w.values);
  const Scale* scales = static_cast<const Scale*>(w.scales);
  const int64_t stride = W::RowBytes(w.k), blocks = w.k / W::kStep;
  auto rows_from = [=, n = w.n](int64_t matrix, int64_t first, int64_t rows) {
    const int64_t row = matrix * n + first;
    float* wide = Scratch<float, 1>(rows * blocks * W::kScales + kLanes);
    Widen(scales + row * blocks * kStored, rows * blocks * kStored, wide);
    return W{codes + row * stride, stride, wide, blocks * W::kScales};
  };
  MultiplyBy(pool, x, rows_from, groups, y, w.n, w.k);
}

ffi::Error MultiplyAll(ffi::ThreadPool& pool, const ffi::Buffer<ffi::F32>& x, const Weights& w, float* y) {
  const int64_t rows = x.dimensions()[0];
  if (rows == 0) return ffi::Error::Success();
  return Multiply(pool, x.typed_data(), w, {{0, 0, rows}}, y);
}

ffi::Error Linear(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w,
                  ffi::Result<ffi::Buffer<ffi::F32>> y) {
  return MultiplyAll(pool, x, PlainWeights(w), y->typed_data());
}

ffi::Error LinearBlocks(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer codes, ffi::AnyBuffer scales,
                        ffi::Result<ffi::Buffer<ffi::F32>> y) {
  return MultiplyAll(pool, x, WeightsInBlocks(codes, scales), y->typed_data());
}

}  // namespace

ffi::Error Multiply(ffi::ThreadPool& pool, const float* x, const Weights& w, const std::vector<Group>& groups, float* y) {
  const int64_t step = w.InBlocks() ? 2 * kLanes : kLanes;
  if (w.k % step != 0)
    return ffi::Error::InvalidArgument("linear: the inner dimension must be a multiple of " + std::to_string(step));
  switch (w.kind) {
    case Weights::Kind::kFloat32: MultiplyPlain<float>(pool, x, w, groups, y); break;
    case Weights::Kind::kBFloat16: MultiplyPlain<BF16>(pool, x, w, groups, y); break;
    case Weights::Kind::kInt4: MultiplyBlocks<Nibbles, uint8_t, F16, 2>(pool, x, w, groups, y); break;
    case Weights::Kind::kInt4Symmetric: MultiplyBlocks<Nibbles, uint8_t, BF16, 1>(pool, x, w, groups, y); break;
    case Weights::Kind::kInt8: MultiplyBlocks<Bytes, int8_t, F16, 1>(pool, x, w, groups, y); break;
  }
  return ffi::Error::Success();
}

}  // namespace jaxinfer

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_linear, jaxinfer::Linear,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_linear_blocks, jaxinfer::LinearBlocks,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
