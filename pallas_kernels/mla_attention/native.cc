// Latent attention in its absorbed form, reading latents and kv_b once and in place.
//
// Some tokens at a time go through three parallel loops: over heads, queries times kv_b's key part; over rows and parts of the
// heads, the online softmax over latents, whose blocks all heads share; over heads, what they mixed times kv_b's value part.
#include <vector>

#include "native.h"
#include "paged_attention/online.h"

namespace jaxinfer {
namespace {

constexpr int64_t kTokens = 64;   // whose absorbed queries are held at a time
constexpr int64_t kQueries = 64;  // of an item of the second loop: heads of a token, or of a few
constexpr int64_t kShare = 16;    // tokens of an item of the others

struct Shape {
  int64_t rows, queries, heads, nope, rope, value, rank, page, width;
  float scale;

  int64_t Dim() const { return nope + rope; }
  // Of a key: the latent and the rotated part, filled up with zeros.
  int64_t KeyDim() const { return rank + (rope + kLanes - 1) / kLanes * kLanes; }
};

inline float Scalar(float x) { return x; }

inline float Scalar(BF16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// y[i] = (sum over k of x[i, k] b[k, :]) * scale: rows of x, of b and of y are `x_stride`, `n` and `y_stride` apart.
template <int N, int V, class B>
inline void Combine(const float* x, int64_t x_stride, const B* b, int64_t count, int64_t n, float scale, float* y,
                    int64_t y_stride) {
  Vec sums[N][V] = {};
  for (int64_t k = 0; k < count; ++k) {
    Vec row[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) row[v] = Load(b + k * n + v * kLanes);
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
      const Vec factor = Splat(x[i * x_stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[i][v] += factor * row[v];
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) Store(y + i * y_stride + v * kLanes, sums[i][v] * scale);
}

// The queries of N tokens and one head: latents of keys from `b` [nope, rank], then the rotated part.
template <int N, class B>
void Absorb(const float* q, const B* b, const Shape& s, float* absorbed) {
  const int64_t q_stride = s.heads * s.Dim(), key = s.KeyDim(), stride = s.heads * key;
  int64_t d = 0;
  for (; d + 4 * kLanes <= s.rank; d += 4 * kLanes)
    Combine<N, 4>(q, q_stride, b + d, s.nope, s.rank, s.scale, absorbed + d, stride);
  for (; d < s.rank; d += kLanes) Combine<N, 1>(q, q_stride, b + d, s.nope, s.rank, s.scale, absorbed + d, stride);
  for (int i = 0; i < N; ++i)
    for (int64_t r = 0; r < key - s.rank; ++r)
      absorbed[i * stride + s.rank + r] = r < s.rope ? q[i * q_stride + s.nope + r] * s.scale : 0.0f;
}

// The results of N tokens and one head: values from `b` [value, rank].
template <int N, class B>
void Project(const float* mixed, const B* b, const Shape& s, float* out) {
  for (int64_t v = 0; v < s.value; ++v) {
    Vec sums[N] = {};
    for (int64_t d = 0; d < s.rank; d += kLanes) {
      const Vec row = Load(b + v * s.rank + d);
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) sums[i] += Load(mixed + i * s.heads * s.rank + d) * row;
    }
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) out[i * s.heads * s.value + v] = Sum(sums[i]);
  }
}

// Calls body(count, token) for `tokens` tokens, up to four at a time; `count` is a compile-time number.
template <class Body>
void InTiles(int64_t first, int64_t end, const Body& body) {
  for (; first + 4 <= end; first += 4) body(std::integral_constant<int, 4>{}, first);
  for (; first < end; ++first) body(std::integral_constant<int, 1>{}, first);
}

template <class T>
void Attend(const Queries& item, const T* pages, const int32_t* table, const Shape& s) {
  const int64_t dim = s.KeyDim(), latent = s.rank + s.rope;
  const int64_t last = *std::max_element(item.high, item.high + item.count);
  const bool turn = PaysToTurn(item.count);
  float* straight = Scratch<float, 1>(dim * kKeys);
  float* turned = Scratch<float, 2>(dim * kKeys);
  for (int64_t start = 0; start <= last; start += kKeys) {
    const int64_t keys = std::min<int64_t>(kKeys, last - start + 1);
    for (int64_t t = 0; t < keys; ++t) {
      const int64_t position = start + t, slot = table[position / s.page] * s.page + position % s.page;
      const T* from = pages + slot * latent;
      float* to = straight + t * dim;
      int64_t d = 0;
      for (; d + kLanes <= latent; d += kLanes) Store(to + d, Load(from + d));
      for (; d < latent; ++d) to[d] = Scalar(from[d]);
      for (; d < dim; ++d) to[d] = 0.0f;
    }
    if (turn) TurnKeys(straight, keys, dim, turned);
    MeetAll(item, {start, keys, dim, straight, turn ? turned : nullptr, straight, s.rank, dim});
  }
}

template <class T, class B>
void Run(ffi::ThreadPool& pool, const float* q, const T* pages, const int32_t* tables, const int32_t* q_start,
         const int32_t* kv_lens, const B* kv_b, float* out, const Shape& s) {
  // An item of the second loop is always the same part of its row, so that its sums do not depend on other rows.
  struct Part {
    int64_t row, first, count;  // queries of the row
  };
  const int64_t most_heads = std::min(s.heads, kQueries), head_parts = (s.heads + most_heads - 1) / most_heads;
  const int64_t most_queries = std::max<int64_t>(kQueries / s.heads, 1), matrix = (s.nope + s.value) * s.rank;
  std::vector<Part> parts;
  for (int64_t row = 0; row < s.rows; ++row)
    for (int64_t first = 0; first < s.queries; first += most_queries)
      parts.push_back({row, first, std::min(most_queries, s.queries - first)});

  for (size_t next = 0; next < parts.size();) {
    const size_t begin = next;
    const int64_t token = parts[begin].row * s.queries + parts[begin].first;
    int64_t tokens = 0;
    do tokens += parts[next++].count;
    while (next < parts.size() && tokens + parts[next].count <= kTokens);
    float* absorbed = Scratch<float, 3>(tokens * s.heads * s.KeyDim());
    float* mixed = Scratch<float, 4>(tokens * s.heads * s.rank);
    const int64_t shares = (tokens + kShare - 1) / kShare;

    ParallelFor(pool, s.heads * shares, [&](int64_t i) {
      const int64_t head = i / shares, first = i % shares * kShare;
      InTiles(first, std::min(first + kShare, tokens), [&](auto count, int64_t t) {
        Absorb<count>(q + ((token + t) * s.heads + head) * s.Dim(), kv_b + head * matrix, s,
                      absorbed + (t * s.heads + head) * s.KeyDim());
      });
    });

    ParallelFor(pool, (next - begin) * head_parts, [&](int64_t i) {
      const Part& part = parts[next - 1 - i / head_parts];  // later queries see more keys: they go first
      const int64_t head = i % head_parts * most_heads, heads = std::min(most_heads, s.heads - head);
      const int64_t first = ((part.row * s.queries + part.first - token) * s.heads + head), count = part.count * heads;
      float* stats = Scratch<float, 5>(2 * count);
      int64_t* bounds = Scratch<int64_t, 1>(2 * count);
      const Queries item{count, absorbed + first * s.KeyDim(), mixed + first * s.rank, stats, stats + count, bounds, bounds + count};
      std::fill_n(item.out, count * s.rank, 0.0f);
      if (kv_lens[part.row] < 1) return;
      for (int64_t j = 0; j < count; ++j) {
        item.peak[j] = kNone;
        item.total[j] = 0.0f;
        item.low[j] = 0;
        item.high[j] = std::min<int64_t>(q_start[part.row] + part.first + j / heads, kv_lens[part.row] - 1);
      }
      Attend(item, pages, tables + part.row * s.width, s);
      for (int64_t j = 0; j < count; ++j)
        for (int64_t d = 0; d < s.rank; d += kLanes) {
          float* sum = item.out + j * s.rank + d;
          Store(sum, Load(sum) * (1.0f / item.total[j]));
        }
    });

    ParallelFor(pool, s.heads * shares, [&](int64_t i) {
      const int64_t head = i / shares, first = i % shares * kShare;
      InTiles(first, std::min(first + kShare, tokens), [&](auto count, int64_t t) {
        Project<count>(mixed + (t * s.heads + head) * s.rank, kv_b + head * matrix + s.nope * s.rank, s,
                       out + ((token + t) * s.heads + head) * s.value);
      });
    });
  }
}

ffi::Error MlaAttention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::AnyBuffer pages, ffi::Buffer<ffi::S32> tables,
                        ffi::Buffer<ffi::S32> q_start, ffi::Buffer<ffi::S32> kv_lens, ffi::AnyBuffer kv_b, float scale,
                        ffi::Result<ffi::Buffer<ffi::F32>> out) {
  auto qd = q.dimensions();
  auto bd = kv_b.dimensions();
  const int64_t rank = bd[2], value = out->dimensions()[3], nope = bd[1] - value;
  const Shape s{qd[0], qd[1], qd[2], nope, qd[3] - nope, value, rank, pages.dimensions()[3], tables.dimensions()[1], scale};
  if (rank % kLanes != 0) return ffi::Error::InvalidArgument("mla_attention: the latent's width must be a multiple of 16");
  auto run = [&](auto* page, auto* b) {
    Run(pool, q.typed_data(), page, tables.typed_data(), q_start.typed_data(), kv_lens.typed_data(), b, out->typed_data(), s);
  };
  auto with_pages = [&](auto* page) {
    if (kv_b.element_type() == ffi::BF16) run(page, static_cast<const BF16*>(kv_b.untyped_data()));
    else run(page, static_cast<const float*>(kv_b.untyped_data()));
  };
  if (pages.element_type() == ffi::BF16) with_pages(static_cast<const BF16*>(pages.untyped_data()));
  else with_pages(static_cast<const float*>(pages.untyped_data()));
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxinfer

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_mla_attention, jaxinfer::MlaAttention,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
