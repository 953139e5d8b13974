// The online softmax that paged_attention and mla_attention share: queries meet one block of keys after the other.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "native.h"

namespace jaxinfer {

constexpr int kKeys = 64;     // keys in a block
constexpr int kParts = kKeys / kLanes;
constexpr int kTile = 4;      // queries whose sums are in registers together
constexpr float kNone = -std::numeric_limits<float>::infinity();

// Queries [count, dim], scaled, with the positions each one sees: [low, high]. What they mix: [count, value_dim].
struct Queries {
  int64_t count;
  float* q;
  float* out;
  float* peak;
  float* total;
  int64_t *low, *high;
};

// Keys of one block: `keys` of them, one after the other [keys, dim], and turned [dim, kKeys] as well when there are queries
// enough to pay for it; and their values [keys, value_dim], a row every `value_stride`.
struct KeyBlock {
  int64_t start, keys, dim;
  const float *straight, *turned, *values;
  int64_t value_dim, value_stride;
};

// Whether so many queries pay for turned keys.
inline bool PaysToTurn(int64_t queries) { return queries > 2 * kTile; }

// straight [kKeys, dim] -> turned [dim, kKeys]
inline void TurnKeys(const float* straight, int64_t keys, int64_t dim, float* turned) {
  for (int64_t d = 0; d < dim; d += kLanes)
    for (int64_t t = 0; t < keys; t += kLanes) Turn(straight + t * dim + d, dim, turned + d * kKeys + t, kKeys);
}

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
    for (int v = 0; v < V; ++v) sums[i][v] = Load(out + i * block.value_dim + d + v * kLanes) * shrink[i];
  for (int64_t t = 0; t < block.keys; ++t) {
    const float* value = block.values + t * block.value_stride + d;
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
    for (int v = 0; v < V; ++v) Store(out + i * block.value_dim + d + v * kLanes, sums[i][v]);
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
  float* out = item.out + first * block.value_dim;
  int64_t d = 0;
  for (; d + 4 * kLanes <= block.value_dim; d += 4 * kLanes) Mix<N, 4>(scores, block, shrink, out, d);
  for (; d < block.value_dim; d += kLanes) Mix<N, 1>(scores, block, shrink, out, d);
}

// All queries of an item meet a block.
inline void MeetAll(const Queries& item, const KeyBlock& block) {
  int64_t j = 0;
  for (; j + kTile <= item.count; j += kTile) Meet<kTile>(item, j, block);
  switch (item.count - j) {
    case 3: Meet<3>(item, j, block); break;
    case 2: Meet<2>(item, j, block); break;
    case 1: Meet<1>(item, j, block); break;
  }
}

}  // namespace jaxinfer
