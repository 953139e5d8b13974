// Attention of query rows over a paged KV cache with an online softmax, reading each visible page once and in place.
//
// An item is one row, one kv head and up to kQueries of the row's queries: with the query heads of the group they share each
// block of keys, which is turned once so that lanes run over keys in the scores and over dimensions in the output.
#include "native.h"
#include "paged_attention/online.h"

namespace jaxinfer {
namespace {

constexpr int kQueries = 32;  // positions of an item; times the group's heads they are its queries

struct Shape {
  int64_t rows, queries, heads, kv_heads, pages, page, width, dim;
  int64_t window, chunk;  // 0: none
  float scale;
  int64_t group() const { return heads / kv_heads; }
};

template <class T>
void Attend(const Queries& item, const T* keys, const T* values, const int32_t* table, const Shape& shape) {
  const int64_t dim = shape.dim;
  int64_t low = item.low[0], high = item.high[0];
  for (int64_t j = 1; j < item.count; ++j) {
    low = std::min(low, item.low[j]);
    high = std::max(high, item.high[j]);
  }
  const bool turn = PaysToTurn(item.count);
  float* straight = Scratch<float, 1>(dim * kKeys);
  float* wide = Scratch<float, 2>(dim * kKeys);
  float* turned = Scratch<float, 5>(dim * kKeys);
  // Blocks begin at multiples of kKeys, so that a query's sums do not depend on the queries beside it. Of the first block,
  // what lies before `low` is not read.
  for (int64_t start = low / kKeys * kKeys; start <= high; start += kKeys) {
    const int64_t count = std::min<int64_t>(kKeys, high - start + 1);
    const int64_t skip = std::max<int64_t>(low - start, 0);
    std::memset(straight, 0, skip * dim * sizeof(float));
    std::memset(wide, 0, skip * dim * sizeof(float));
    for (int64_t t = skip; t < count; ++t) {
      const int64_t position = start + t, slot = table[position / shape.page] * shape.page + position % shape.page;
      for (int64_t d = 0; d < dim; d += kLanes) {
        Store(straight + t * dim + d, Load(keys + slot * dim + d));
        Store(wide + t * dim + d, Load(values + slot * dim + d));
      }
    }
    if (turn) TurnKeys(straight, count, dim, turned);  // with what is left past the last key: its scores are masked
    MeetAll(item, {start, count, dim, straight, turn ? turned : nullptr, wide, dim, dim});
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
