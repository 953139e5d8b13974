// Attention of query rows over a paged KV cache with an online softmax, reading each visible page once and in place.
//
// An item is one row, one kv head and up to kQueries of the row's queries: with the query heads of the group they share each
// block of keys, which is turned once so that lanes run over keys in the scores and over dimensions in the output.
#include <cmath>
#include <limits>

#include "native.h"

namespace jaxinfer {
namespace {

constexpr int kKeys = 64;     // keys in a block
constexpr int kParts = kKeys / kLanes;
constexpr int kQueries = 32;  // positions of an item; times the group's heads they are its queries
constexpr int kTile = 4;      // queries whose sums are in registers together
constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Shape {
  int64_t rows, queries, heads, kv_heads, pages, page, width, dim;
  int64_t window, chunk;  // 0: none
  float scale;
  int64_t group() const { return heads / kv_heads; }
};

// Queries [count, dim], scaled, with the positions each one sees: [low, high].
struct Queries {
  int64_t count;
  float* q;
  float* out;
  float* peak;
  float* total;
  int64_t *low, *high;
};

// Keys and values of one block: `keys` of them, one after the other [keys, dim], and the keys turned [dim, kKeys] as well
// when there are queries enough to pay for it.
struct KeyBlock {
  int64_t start, keys, dim;
  const float *straight, *turned, *values;
};

// Scores of N queries by all keys of a block, lanes over keys.
template <int N>
inline void TurnedScores(const float* q, const KeyBlock& block, float* scores) {
  Vec sums[N][kParts] = {};
  for (int64_t d = 0; d < block.dim; ++d) {
    const float* row = block.turned + d * kKeys;
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      Vec value = Splat(q[i * block.dim + d]);
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) sums[i][p] += value * Load(row + p * kLanes);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i)
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) Store(scores + i * kKeys + p * kLanes, sums[i][p]);
}

// The same, lanes over dimensions.
template <int N>
inline void StraightScores(const float* q, const KeyBlock& block, float* scores) {
  for (int64_t t = 0; t < block.keys; ++t) {
    Vec sums[N] = {};
    for (int64_t d = 0; d < block.dim; d += kLanes) {
      Vec key = Load(block.straight + t * block.dim + d);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) sums[i] += Load(q + i * block.dim + d) * key;
    }
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) scores[i * kKeys + t] = Sum(sums[i]);
  }
}

// out[i] = out[i] * shrink[i] + weights[i] . values, for V vectors of dimensions from d on.
template <int N, int V>
inline void Mix(const float* weights, const KeyBlock& block, const float* shrink, float* out, int64_t d) {
  Vec sums[N][V];
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[i][v] = Load(out + i * block.dim + d + v * kLanes) * shrink[i];
  for (int64_t t = 0; t < block.keys; ++t) {
    const float* value = block.values + t * block.dim + d;
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      Vec weight = Splat(weights[i * kKeys + t]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[i][v] += weight * Load(value + v * kLanes);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) Store(out + i * block.dim + d + v * kLanes, sums[i][v]);
}

template <int N>
void Meet(const Queries& item, int64_t first, const KeyBlock& block) {
  alignas(64) float scores[N * kKeys];
  float shrink[N];
  const float* q = item.q + first * block.dim;
  if (block.turned) TurnedScores<N>(q, block, scores);
  else StraightScores<N>(q, block, scores);
  for (int i = 0; i < N; ++i) {
    const int64_t j = first + i;
    const int64_t low = std::max<int64_t>(item.low[j] - block.start, 0);
    const int64_t high = std::min<int64_t>(item.high[j] - block.start, block.keys - 1);
    float* s = scores + i * kKeys;
    for (int64_t t = 0; t < std::min<int64_t>(low, kKeys); ++t) s[t] = kNone;
    for (int64_t t = std::max<int64_t>(high + 1, 0); t < kKeys; ++t) s[t] = kNone;
    Vec most = Load(s);
    for (int p = 1; p < kParts; ++p) most = Max(most, Load(s + p * kLanes));
    const float before = item.peak[j], peak = std::max(before, Max(most));
    shrink[i] = 1.0f;
    if (peak == kNone) {  // sees nothing yet
      for (int p = 0; p < kParts; ++p) Store(s + p * kLanes, Vec{});
      continue;
    }
    if (peak > before) shrink[i] = before == kNone ? 0.0f : std::exp(before - peak);
    Vec total = {};
    for (int p = 0; p < kParts; ++p) {
      Vec weight = Exp(Load(s + p * kLanes) - peak);
      Store(s + p * kLanes, weight);
      total += weight;
    }
    item.total[j] = item.total[j] * shrink[i] + Sum(total);
    item.peak[j] = peak;
  }
  float* out = item.out + first * block.dim;
  int64_t d = 0;
  for (; d + 4 * kLanes <= block.dim; d += 4 * kLanes) Mix<N, 4>(scores, block, shrink, out, d);
  for (; d < block.dim; d += kLanes) Mix<N, 1>(scores, block, shrink, out, d);
}

template <class T>
void Attend(const Queries& item, const T* keys, const T* values, const int32_t* table, const Shape& shape) {
  const int64_t dim = shape.dim;
  int64_t low = item.low[0], high = item.high[0];
  for (int64_t j = 1; j < item.count; ++j) {
    low = std::min(low, item.low[j]);
    high = std::max(high, item.high[j]);
  }
  const bool turn = item.count > 2 * kTile;
  float* straight = Scratch<float, 1>(dim * kKeys);
  float* wide = Scratch<float, 2>(dim * kKeys);
  float* turned = Scratch<float, 5>(dim * kKeys);
  // Blocks begin at multiples of kKeys, so that a query's sums do not depend on the queries beside it. Of the first block,
  // what lies before `low` is not read.
  for (int64_t start = low / kKeys * kKeys; start <= high; start += kKeys) {
    const KeyBlock block{start, std::min<int64_t>(kKeys, high - start + 1), dim, straight, turn ? turned : nullptr, wide};
    const int64_t skip = std::max<int64_t>(low - start, 0);
    std::memset(straight, 0, skip * dim * sizeof(float));
    std::memset(wide, 0, skip * dim * sizeof(float));
    for (int64_t t = skip; t < block.keys; ++t) {
      const int64_t position = start + t, slot = table[position / shape.page] * shape.page + position % shape.page;
      for (int64_t d = 0; d < dim; d += kLanes) {
        Store(straight + t * dim + d, Load(keys + slot * dim + d));
        Store(wide + t * dim + d, Load(values + slot * dim + d));
      }
    }
    if (turn)  // with what is left in `straight` past the last key: its scores are masked
      for (int64_t d = 0; d < dim; d += kLanes)
        for (int64_t t = 0; t < block.keys; t += kLanes) Turn(straight + t * dim + d, dim, turned + d * kKeys + t, kKeys);
    int64_t j = 0;
    for (; j + kTile <= item.count; j += kTile) Meet<kTile>(item, j, block);
    switch (item.count - j) {
      case 3: Meet<3>(item, j, block); break;
      case 2: Meet<2>(item, j, block); break;
      case 1: Meet<1>(item, j, block); break;
    }
  }
}

template <class Q, class T>
void Run(ffi::ThreadPool& pool, const Q* q, const T* pages, const int32_t* tables, const int32_t* q_start,
         const int32_t* kv_lens, Q* out, const Shape& s) {
  const int64_t parts = (s.queries + kQueries - 1) / kQueries;
  const int64_t plane = s.pages * s.page * s.dim;  // one head of keys or of values
  const int64_t items = s.rows * parts * s.kv_heads;
  ParallelFor(pool, items, [&](int64_t reversed) {
    const int64_t i = items - 1 - reversed;  // later blocks of a prompt see more keys: they go first
    const int64_t head = i % s.kv_heads, part = i / s.kv_heads % parts, row = i / s.kv_heads / parts;
    const int64_t first = part * kQueries, positions = std::min<int64_t>(kQueries, s.queries - first);
    const int64_t group = s.group(), most = positions * group;
    float* floats = Scratch<float, 3>(most * (2 * s.dim + 2));
    int64_t* bounds = Scratch<int64_t, 4>(2 * most);
    Queries item{0, floats, floats + most * s.dim, floats + 2 * most * s.dim, floats + 2 * most * s.dim + most,
                 bounds, bounds + most};
    for (int64_t p = 0; p < positions; ++p) {
      const int64_t position = q_start[row] + first + p;
      int64_t low = 0;
      if (s.window) low = std::max(low, position - s.window + 1);
      if (s.chunk) low = std::max(low, position - position % s.chunk);
      const int64_t high = std::min<int64_t>(position, kv_lens[row] - 1);
      for (int64_t g = 0; g < group; ++g) {
        const int64_t token = (row * s.queries + first + p) * s.heads + head * group + g;
        if (low > high) {  // padding
          std::memset(out + token * s.dim, 0, s.dim * sizeof(Q));
          continue;
        }
        const int64_t j = item.count++;
        for (int64_t d = 0; d < s.dim; d += kLanes) {
          Store(item.q + j * s.dim + d, Load(q + token * s.dim + d) * s.scale);
          Store(item.out + j * s.dim + d, Vec{});
        }
        item.peak[j] = kNone;
        item.total[j] = 0.0f;
        item.low[j] = low;
        item.high[j] = high;
      }
    }
    if (!item.count) return;
    Attend(item, pages + head * plane, pages + (s.kv_heads + head) * plane, tables + row * s.width, s);
    for (int64_t j = 0; j < item.count; ++j) {
      const int64_t token = (row * s.queries + first + j / group) * s.heads + head * group + j % group;
      for (int64_t d = 0; d < s.dim; d += kLanes)
        Store(out + token * s.dim + d, Load(item.out + j * s.dim + d) * (1.0f / item.total[j]));
    }
  });
}

ffi::Error PagedAttention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer pages, ffi::Buffer<ffi::S32> tables,
                          ffi::Buffer<ffi::S32> q_start, ffi::Buffer<ffi::S32> kv_lens, float scale, int64_t window,
                          int64_t chunk, ffi::Result<ffi::AnyBuffer> out) {
  auto qd = q.dimensions();
  auto pd = pages.dimensions();
  Shape s{qd[0], qd[1], qd[2], pd[1], pd[2], pd[3], tables.dimensions()[1], qd[3], window, chunk, scale};
  if (s.dim % kLanes != 0) return ffi::Error::InvalidArgument("paged_attention: head_dim must be a multiple of 16");
  const int32_t *t = tables.typed_data(), *start = q_start.typed_data(), *lens = kv_lens.typed_data();
  auto run = [&](auto* query, auto* page) {
    using Q = std::remove_const_t<std::remove_pointer_t<decltype(query)>>;
    Run(pool, query, page, t, start, lens, static_cast<Q*>(out->untyped_data()), s);
  };
  auto with_pages = [&](auto* query) {
    if (pages.element_type() == ffi::BF16) run(query, static_cast<const jaxinfer::BF16*>(pages.untyped_data()));
    else run(query, static_cast<const float*>(pages.untyped_data()));
  };
  if (q.element_type() == ffi::BF16) with_pages(static_cast<const jaxinfer::BF16*>(q.untyped_data()));
  else with_pages(static_cast<const float*>(q.untyped_data()));
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxinfer

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_paged_attention, jaxinfer::PagedAttention,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("chunk")
                                  .Ret<xla::ffi::AnyBuffer>());
