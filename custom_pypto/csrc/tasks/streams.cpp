#include "streams.h"

#include <algorithm>
#include <cmath>

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

// that read a weight together, while they are in a cache
constexpr int64_t kTokens = 4;

// products[token][w] of the normed streams and row w of the weight
template <typename T>
AlignedVector<float> project(const T* streams, int64_t tokens, const StreamWeights& weights) {
  const int64_t width = weights.weight.size(0), dims = weights.weight.size(1);
  const float* weight = weights.weight.const_data_ptr<float>();
  AlignedVector<float> products(tokens * width);
  const int64_t groups = (tokens + kTokens - 1) / kTokens;
  // of the weight, for threads that have no tokens of their own
  const int64_t threads = at::get_num_threads(), parts = groups < threads ? threads : 1;
  run_tasks(
      groups * parts, [&] { return AlignedVector<float>(kTokens * dims); },
      [&](AlignedVector<float>& x, int64_t task) {
        const int64_t first = task / parts * kTokens, part = task % parts;
        const int64_t count = std::min(kTokens, tokens - first);
        float norms[kTokens];
        widen(streams + first * dims, count * dims, x.data());
        for (int64_t t = 0; t < count; ++t) {
          const float* row = x.data() + t * dims;
          const float square = dims == 0 ? 1.0f : kernels().dot(row, row, dims) / dims;
          norms[t] = 1.0f / std::sqrt(square + weights.norm_eps);
        }
        for (int64_t w = part * width / parts; w < (part + 1) * width / parts; ++w) {
          for (int64_t t = 0; t < count; ++t) {
            const float product = kernels().dot(x.data() + t * dims, weight + w * dims, dims);
            products[(first + t) * width + w] = norms[t] * product;
          }
        }
      });
  return products;
}

// to = the sum of n streams of a token, each times sigmoid(x) + eps
template <typename T>
void collapse(const T* from, const float* x, int64_t n, int64_t dims, float eps, float* stream,
              float* sum, T* to) {
  std::fill_n(sum, dims, 0.0f);
  for (int64_t i = 0; i < n; ++i) {
    widen(from + i * dims, dims, stream);
    const float weight = sigmoid(x[i]) + eps;
    for (int64_t d = 0; d < dims; ++d) sum[d] += weight * stream[d];
  }
  narrow(sum, dims, to);
}

// Collapses the streams of each token by the first N of its numbers, and calls rest(token,
// numbers).
template <typename T, typename Rest>
void collapse_tokens(const Tensor& of_tokens, const StreamWeights& weights, const Tensor& out,
                     const Rest& rest) {
  const Tensor streams = of_tokens.contiguous();
  const int64_t tokens = streams.size(0) * streams.size(1), n = streams.size(2),
                dims = streams.size(3), width = weights.base.numel();
  const T* from = streams.const_data_ptr<T>();
  T* to = out.mutable_data_ptr<T>();
  const AlignedVector<float> products = project(from, tokens, weights);
  const float *base = weights.base.const_data_ptr<float>(),
              *scale = weights.scale.const_data_ptr<float>();
  for_rows(tokens, n * dims, [&](int64_t begin, int64_t end) {
    AlignedVector<float> numbers(width), stream(dims), sum(dims);
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t i = 0; i < width; ++i) {
        numbers[i] = products[token * width + i] * scale[std::min<int64_t>(i / n, 2)] + base[i];
      }
      rest(token, numbers.data());
      collapse(from + token * n * dims, numbers.data(), n, dims, weights.eps, stream.data(),
               sum.data(), to + token * dims);
    }
  });
}

template <typename T>
void connect(const HyperConnectionParams& p) {
  const int64_t n = p.streams.size(2);
  const float eps = p.weights.eps;
  float *posts = p.post.mutable_data_ptr<float>(), *combs = p.comb.mutable_data_ptr<float>();
  collapse_tokens<T>(p.streams, p.weights, p.collapsed, [&](int64_t token, const float* numbers) {
    const float* post = numbers + n;
    for (int64_t i = 0; i < n; ++i) posts[token * n + i] = 2.0f * sigmoid(post[i]);

    float* comb = combs + token * n * n;
    std::copy_n(post + n, n * n, comb);
    AlignedVector<float> sums(n);
    softmax_rows(comb, n, eps);
    normalize_columns(comb, n, eps, sums.data());
    for (int64_t i = 1; i < p.iterations; ++i) {
      normalize_rows(comb, n, eps);
      normalize_columns(comb, n, eps, sums.data());
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

void collapse_streams(const Tensor& streams, const StreamWeights& weights, const Tensor& out) {
  with_type(streams.scalar_type(), [&](auto type) {
    collapse_tokens<decltype(type)>(streams, weights, out, [](int64_t, const float*) {});
  });
}

}  // namespace custom_pypto
