// The product that linear and grouped_linear share: see linear/native.cc.
#pragma once

#include <vector>

#include "native.h"

namespace jaxinfer {

// Matrices [E, N, K] one after the other, as plain numbers or in blocks of 32 codes along K (see blocks.py).
struct Weights {
  enum class Kind { kFloat32, kBFloat16, kInt4, kInt4Symmetric, kInt8 };
  Kind kind;
  const void* values;  // or codes
  const void* scales;  // null for plain numbers
  int64_t n, k;

  bool InBlocks() const { return scales != nullptr; }
};

inline Weights PlainWeights(const ffi::AnyBuffer& w) {
  const auto sizes = w.dimensions().last(2);
  const auto kind = w.element_type() == ffi::BF16 ? Weights::Kind::kBFloat16 : Weights::Kind::kFloat32;
  return {kind, w.untyped_data(), nullptr, sizes[0], sizes[1]};
}

inline Weights WeightsInBlocks(const ffi::AnyBuffer& codes, const ffi::AnyBuffer& scales) {
  const auto sizes = codes.dimensions().last(2);
  const bool halves = codes.element_type() == ffi::U8;
  const auto kind = !halves                                 ? Weights::Kind::kInt8
                    : scales.element_type() == ffi::BF16 ? Weights::Kind::kInt4Symmetric
                                                            : Weights::Kind::kInt4;
  return {kind, codes.untyped_data(), scales.untyped_data(), sizes[0], halves ? 2 * sizes[1] : sizes[1]};
}

// Rows [first, first + rows) of x, which meet one of the matrices.
struct Group {
  int64_t matrix, first, rows;
};

// y[i, :] = x[i, :] w^T for the rows of all groups, none of which is empty. Other rows of y are left alone.
ffi::Error Multiply(ffi::ThreadPool& pool, const float* x, const Weights& w, const std::vector<Group>& groups, float* y);

}  // namespace jaxinfer
