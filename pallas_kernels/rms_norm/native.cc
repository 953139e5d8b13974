// y = x / sqrt(mean(x^2) + eps) * weight, row by row, in float32.
#include <cmath>

#include "native.h"

namespace jaxinfer {
namespace {

constexpr int64_t kGrain = 32 << 10;  // values that are worth another thread

template <class W>
void Normalise(ffi::ThreadPool& pool, const float* x, const W* weight, float* y, int64_t rows, int64_t dim, float eps) {
  const int64_t grain = std::max<int64_t>(1, kGrain / dim);
  ParallelFor(pool, (rows + grain - 1) / grain, [&](int64_t item) {
    for (int64_t r = item * grain; r < std::min(rows, (item + 1) * grain); ++r) {
      const float* from = x + r * dim;
      Vec squares = {};
      for (int64_t d = 0; d < dim; d += kLanes) {
        Vec v = Load(from + d);
        squares += v * v;
      }
      const float scale = 1.0f / std::sqrt(Sum(squares) / dim + eps);
      for (int64_t d = 0; d < dim; d += kLanes) Store(y + r * dim + d, Load(from + d) * scale * Load(weight + d));
    }
  });
}

ffi::Error RmsNorm(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer weight, float eps,
                   ffi::Result<ffi::Buffer<ffi::F32>> y) {
  const int64_t dim = weight.dimensions()[0], rows = x.element_count() / dim;
  if (dim % kLanes != 0) return ffi::Error::InvalidArgument("rms_norm: the width must be a multiple of 16");
  auto run = [&](auto* w) { Normalise(pool, x.typed_data(), w, y->typed_data(), rows, dim, eps); };
  if (weight.element_type() == ffi::BF16) run(static_cast<const jaxinfer::BF16*>(weight.untyped_data()));
  else run(static_cast<const float*>(weight.untyped_data()));
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxinfer

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_rms_norm, jaxinfer::RmsNorm,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Attr<float>("eps")
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
