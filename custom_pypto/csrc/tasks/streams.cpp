// The streams of manifold-constrained hyper-connections.
#include <algorithm>
#include <cmath>

#include "row_functions.h"
#include "rows.h"

namespace custom_pypto {
namespace {

// rows to softmax + eps
void softmax_rows(float* x, int64_t n, float eps) {
  for (float* end = x + n * n; x != end; x += n) {
    const float most = *std::max_element(x, x + n);
    float sum = 0.0f;
    for (int64_t i = 0; i < n; ++i) sum += x[i] = std::exp(x[i] - most);
    for (int64_t i = 0; i < n; ++i) x[i] = x[i] / sum + eps;
  }
}

void normalize_rows(float* x, int64_t n, float eps) {
  for (float* end = x + n * n; x != end; x += n) {
    float sum = 0.0f;
    for (int64_t i = 0; i < n; ++i) sum += x[i];
    for (int64_t i = 0; i < n; ++i) x[i] /= sum + eps;
  }
}

void normalize_columns(float* x, int64_t n, float eps, float* sums) {
  std::fill_n(sums, n, 0.0f);
  for (int64_t i = 0; i < n * n; ++i) sums[i % n] += x[i];
  for (int64_t i = 0; i < n * n; ++i) x[i] /= sums[i % n] + eps;
}

template <typename T>
void connect(const HyperConnectionParams& p) {
  const Tensor streams = p.streams.contiguous();
  const int64_t n = streams.size(2), dims = streams.size(3), width = p.base.numel();
  const T* from = streams.const_data_ptr<T>();
  T* to = p.collapsed.mutable_data_ptr<T>();
  const float *mixes = p.mixes.const_data_ptr<float>(), *base = p.base.const_data_ptr<float>(),
              *scale = p.scale.const_data_ptr<float>();
  float *posts = p.post.mutable_data_ptr<float>(), *combs = p.comb.mutable_data_ptr<float>();
  for_rows(streams.size(0) * streams.size(1), n * dims, [&](int64_t begin, int64_t end) {
    AlignedVector<float> weights(width), sums(n), stream(dims), sum(dims);
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t i = 0; i < width; ++i) {
        weights[i] = mixes[token * width + i] * scale[std::min<int64_t>(i / n, 2)] + base[i];
      }
      const float *pre = weights.data(), *post = pre + n;
      for (int64_t i = 0; i < n; ++i) posts[token * n + i] = 2.0f * sigmoid(post[i]);

      float* comb = combs + token * n * n;
      std::copy_n(post + n, n * n, comb);
      softmax_rows(comb, n, p.eps);
      normalize_columns(comb, n, p.eps, sums.data());
      for (int64_t i = 1; i < p.iterations; ++i) {
        normalize_rows(comb, n, p.eps);
        normalize_columns(comb, n, p.eps, sums.data());
      }

      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int64_t i = 0; i < n; ++i) {
        widen(from + (token * n + i) * dims, dims, stream.data());
        const float weight = sigmoid(pre[i]) + p.eps;
        for (int64_t d = 0; d < dims; ++d) sum[d] += weight * stream[d];
      }
      narrow(sum.data(), dims, to + token * dims);
    }
  });
}

template <typename T>
void mix(const Tensor& streams, const Tensor& x, const float* post, const float* comb,
         const Tensor& out) {
  const Tensor streams_ = streams.contiguous(), x_ = x.contiguous();
  const int64_t n = streams.size(2), dims = streams.size(3);
  T* to = out.mutable_data_ptr<T>();
  for_rows(streams.size(0) * streams.size(1), n * dims, [&](int64_t begin, int64_t end) {
    AlignedVector<float> from(n * dims), added(dims), product(dims), sum(dims);
    for (int64_t token = begin; token < end; ++token) {
      widen(streams_.const_data_ptr<T>() + token * n * dims, n * dims, from.data());
      widen(x_.const_data_ptr<T>() + token * dims, dims, added.data());
      for (int64_t i = 0; i < n; ++i) {
        T* row = to + (token * n + i) * dims;
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (int64_t j = 0; j < n; ++j) {
          const float weight = rounded<T>(comb[(token * n + j) * n + i]);
          for (int64_t d = 0; d < dims; ++d) sum[d] += weight * from[j * dims + d];
        }
        const float weight = rounded<T>(post[token * n + i]);
        for (int64_t d = 0; d < dims; ++d) product[d] = weight * added[d];
        // each is rounded before they are added
        narrow(sum.data(), dims, row);
        widen(row, dims, sum.data());
        narrow(product.data(), dims, row);
        widen(row, dims, product.data());
        for (int64_t d = 0; d < dims; ++d) sum[d] += product[d];
        narrow(sum.data(), dims, row);
      }
    }
  });
}

}  // namespace

void mix_streams(const Tensor& streams, const Tensor& x, const Tensor& post, const Tensor& comb,
                 const Tensor& out) {
  with_type(x.scalar_type(), [&](auto type) {
    mix<decltype(type)>(streams, x, post.const_data_ptr<float>(), comb.const_data_ptr<float>(),
                        out);
  });
}

void connect_streams(const HyperConnectionParams& p) {
  with_type(p.streams.scalar_type(), [&](auto type) { connect<decltype(type)>(p); });
}

}  // namespace custom_pypto
