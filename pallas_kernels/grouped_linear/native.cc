// y[i, :] = x[i, :] w[g]^T for the rows i of each group g, which follow each other. Matrices of groups without rows are not touched.
#include "linear/products.h"

namespace jaxinfer {
namespace {

ffi::Error Grouped(ffi::ThreadPool& pool, const ffi::Buffer<ffi::F32>& x, const Weights& w, const ffi::Buffer<ffi::S32>& sizes,
                   float* y) {
  const int64_t rows = x.dimensions()[0];
  std::vector<Group> groups;
  int64_t first = 0;
  for (int64_t g = 0; g < static_cast<int64_t>(sizes.element_count()); ++g) {
    const int64_t size = sizes.typed_data()[g];
    if (size < 0 || size > rows - first)
      return ffi::Error::InvalidArgument("grouped_linear: group sizes must not be negative, nor exceed the rows in all");
    if (size > 0) groups.push_back({g, first, size});
    first += size;
  }
  std::fill(y + first * w.n, y + rows * w.n, 0.0f);
  return groups.empty() ? ffi::Error::Success() : Multiply(pool, x.typed_data(), w, groups, y);
}

ffi::Error GroupedLinear(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> sizes, ffi::AnyBuffer w,
                         ffi::Result<ffi::Buffer<ffi::F32>> y) {
  return Grouped(pool, x, PlainWeights(w), sizes, y->typed_data());
}

ffi::Error GroupedLinearBlocks(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> sizes, ffi::AnyBuffer codes,
                               ffi::AnyBuffer scales, ffi::Result<ffi::Buffer<ffi::F32>> y) {
  return Grouped(pool, x, WeightsInBlocks(codes, scales), sizes, y->typed_data());
}

}  // namespace
}  // namespace jaxinfer

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_grouped_linear, jaxinfer::GroupedLinear,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_grouped_linear_blocks, jaxinfer::GroupedLinearBlocks,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
