#include "runtime/cublaslt.h"

#include <cublasLt.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>

#include "runtime/cuda_device.h"
#include "runtime/cuda_status.h"
#include "runtime/status.h"
#include "runtime/str_cat.h"

namespace dsv4 {
namespace {

// What cublasLt can make use of.
constexpr int64_t kMaxAlignment = 256;
constexpr int64_t kMinAlignment = 16;

#define DSV4_RETURN_IF_CUBLAS_ERROR(call)                                                    \
  do {                                                                                       \
    if (const cublasStatus_t dsv4_error = (call); dsv4_error != CUBLAS_STATUS_SUCCESS)       \
      return absl::InternalError(StrCat("cublaslt: ", cublasLtGetStatusString(dsv4_error))); \
  } while (false)

int64_t RowBytes(const TensorView& view) { return view.strides[0] * DTypeBytes(view.dtype); }

int64_t Alignment(const TensorView& view) {
  const auto address = reinterpret_cast<uintptr_t>(view.data);
  int64_t alignment = kMaxAlignment;
  while (address % static_cast<uintptr_t>(alignment) != 0) alignment /= 2;
  return alignment;
}

// All that an algorithm's choice depends on.
struct Key {
  int64_t rows, inputs, outputs;
  int64_t x_stride, weight_stride, out_stride;
  int64_t x_alignment, weight_alignment, out_alignment;
  DType out_dtype;

  auto Tie() const {
    return std::tie(rows, inputs, outputs, x_stride, weight_stride, out_stride, x_alignment, weight_alignment,
                    out_alignment, out_dtype);
  }
  friend bool operator<(const Key& a, const Key& b) { return a.Tie() < b.Tie(); }
};

Key MakeKey(const CublasLtProduct& product) {
  const TensorView& weight = product.weight.view();
  return {.rows = product.x.extents[0],
          .inputs = product.x.extents[1],
          .outputs = weight.extents[0],
          .x_stride = product.x.strides[0],
          .weight_stride = weight.strides[0],
          .out_stride = product.out.strides[0],
          .x_alignment = Alignment(product.x),
          .weight_alignment = Alignment(weight),
          .out_alignment = Alignment(product.out),
          .out_dtype = product.out.dtype};
}

// Descriptors and the algorithm; kept for the life of the process.
struct Plan {
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t weight = nullptr;
  cublasLtMatrixLayout_t x = nullptr;
  cublasLtMatrixLayout_t out = nullptr;
  cublasLtMatmulAlgo_t algorithm = {};
};

// To cublasLt, which counts along columns first, a row-major matrix is its transpose: out^T [O, N] = W x^T.
absl::Status Describe(const Key& key, Plan& plan) {
  const cudaDataType_t out_type = key.out_dtype == DType::kF32 ? CUDA_R_32F : CUDA_R_16BF;
  const auto rows = static_cast<uint64_t>(key.rows);
  const auto inputs = static_cast<uint64_t>(key.inputs);
  const auto outputs = static_cast<uint64_t>(key.outputs);
  DSV4_RETURN_IF_CUBLAS_ERROR(cublasLtMatmulDescCreate(&plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const cublasOperation_t transpose = CUBLAS_OP_T;
  DSV4_RETURN_IF_CUBLAS_ERROR(
      cublasLtMatmulDescSetAttribute(plan.product, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof(transpose)));
  DSV4_RETURN_IF_CUBLAS_ERROR(
      cublasLtMatrixLayoutCreate(&plan.weight, CUDA_R_16BF, inputs, outputs, key.weight_stride));
  DSV4_RETURN_IF_CUBLAS_ERROR(cublasLtMatrixLayoutCreate(&plan.x, CUDA_R_16BF, inputs, rows, key.x_stride));
  DSV4_RETURN_IF_CUBLAS_ERROR(cublasLtMatrixLayoutCreate(&plan.out, out_type, outputs, rows, key.out_stride));
  return absl::OkStatus();
}

// Kept in `preference` until the choice is made.
absl::Status Choose(cublasLtHandle_t handle, const Key& key, cublasLtMatmulPreference_t preference, Plan& plan) {
  const auto set = [preference](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    return cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value));
  };
  DSV4_RETURN_IF_CUBLAS_ERROR(
      set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kCudaWorkspaceBytes)));
  // Split sums are added up in a second pass, not in place.
  DSV4_RETURN_IF_CUBLAS_ERROR(
      set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
          static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE)));
  DSV4_RETURN_IF_CUBLAS_ERROR(
      set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(key.weight_alignment)));
  DSV4_RETURN_IF_CUBLAS_ERROR(set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(key.x_alignment)));
  DSV4_RETURN_IF_CUBLAS_ERROR(
      set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(key.out_alignment)));
  DSV4_RETURN_IF_CUBLAS_ERROR(
      set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(key.out_alignment)));
  cublasLtMatmulHeuristicResult_t result = {};
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, plan.product, plan.weight, plan.x, plan.out,
                                                               plan.out, preference, 1, &result, &found);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && found == 0)) {
    return absl::UnimplementedError(StrCat("cublaslt: no algorithm for bf16 [", key.rows, ", ", key.inputs,
                                           "] times bf16 [", key.outputs, ", ", key.inputs, "] transposed"));
  }
  DSV4_RETURN_IF_CUBLAS_ERROR(status);
  DSV4_RETURN_IF_CUBLAS_ERROR(result.state);
  plan.algorithm = result.algo;
  return absl::OkStatus();
}

absl::Status MakePlan(cublasLtHandle_t handle, const Key& key, Plan& plan) {
  DSV4_RETURN_IF_ERROR(Describe(key, plan));
  cublasLtMatmulPreference_t preference = nullptr;
  DSV4_RETURN_IF_CUBLAS_ERROR(cublasLtMatmulPreferenceCreate(&preference));
  const absl::Status status = Choose(handle, key, preference, plan);
  cublasLtMatmulPreferenceDestroy(preference);
  return status;
}

void Destroy(const Plan& plan) {
  if (plan.product != nullptr) cublasLtMatmulDescDestroy(plan.product);
  for (const cublasLtMatrixLayout_t layout : {plan.weight, plan.x, plan.out}) {
    if (layout != nullptr) cublasLtMatrixLayoutDestroy(layout);
  }
}

class Plans {
 public:
  static Plans& Get() {
    static auto* const plans = new Plans();  // never destroyed, as the driver may be gone by then
    return *plans;
  }

  absl::Status Run(Stream& stream, const CublasLtProduct& product) {
    const cudaStream_t cuda_stream = CudaStreamOf(stream);
    const Key key = MakeKey(product);
    const std::lock_guard<std::mutex> lock(mutex_);
    auto plan = plans_.find(key);
    if (plan == plans_.end()) {
      cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
      DSV4_RETURN_IF_CUDA_ERROR("cublaslt", cudaStreamIsCapturing(cuda_stream, &capture));
      if (capture != cudaStreamCaptureStatusNone) {
        return absl::FailedPreconditionError(StrCat(
            "cublaslt: the product of ", product.x.ToString(), " and ", product.weight.ToString(),
            " has no algorithm yet and cannot choose one while the stream is being captured; run it once before"));
      }
      if (handle_ == nullptr) DSV4_RETURN_IF_CUBLAS_ERROR(cublasLtCreate(&handle_));
      Plan made;
      if (absl::Status status = MakePlan(handle_, key, made); !status.ok()) {
        Destroy(made);
        return status;
      }
      plan = plans_.emplace(key, made).first;
    }
    DSV4_ASSIGN_OR_RETURN(void* const workspace, CudaWorkspaceOf(stream));
    const float one = 1.0f;
    const float zero = 0.0f;
    const Plan& p = plan->second;
    DSV4_RETURN_IF_CUBLAS_ERROR(cublasLtMatmul(handle_, p.product, &one, product.weight.data(), p.weight,
                                               product.x.data, p.x, &zero, product.out.data, p.out, product.out.data,
                                               p.out, &p.algorithm, workspace, kCudaWorkspaceBytes, cuda_stream));
    return absl::OkStatus();
  }

 private:
  std::mutex mutex_;
  cublasLtHandle_t handle_ = nullptr;
  std::map<Key, Plan> plans_;
};

}  // namespace

bool CublasLtFits(const CublasLtProduct& product) {
  for (const TensorView* view : {&product.x, &product.weight.view(), &product.out}) {
    if (view->extents[0] < 1 || view->extents[1] < 1) return false;
    if (Alignment(*view) < kMinAlignment || RowBytes(*view) % kMinAlignment != 0) return false;
    if (view->strides[0] < view->extents[1]) return false;
  }
  return true;
}

absl::Status RecordCublasLtProduct(Stream& stream, const CublasLtProduct& product) {
  if (stream.device().kind() != DeviceKind::kCuda) {
    return absl::InternalError(StrCat("cublaslt: not possible on ", stream.device().name()));
  }
  return Plans::Get().Run(stream, product);
}

}  // namespace dsv4
