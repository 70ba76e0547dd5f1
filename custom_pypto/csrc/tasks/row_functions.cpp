#include "row_functions.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "rows.h"

namespace custom_pypto {
namespace {

template <typename T>
void norm(const Tensor& x, const OptionalTensor& weight, float eps, const Tensor& out) {
  const int64_t dims = x.size(-1), count = out.numel() / dims;
  const Tensor rows = dense(x).reshape({count, dims});
  const T* from = rows.const_data_ptr<T>();
  T* to = out.mutable_data_ptr<T>();
  const bool rounds_first = weight && weight->scalar_type() == x.scalar_type();
  AlignedVector<float> scale(dims);
  if (rounds_first) {
    widen(weight->contiguous().const_data_ptr<T>(), dims, scale.data());
  } else if (weight) {
    std::copy_n(weight->contiguous().const_data_ptr<float>(), dims, scale.data());
  }
  for_rows(count, dims, [&](int64_t begin, int64_t end) {
    AlignedVector<float> values(dims);
    for (int64_t row = begin; row < end; ++row) {
      T* y = to + row * dims;
      float* v = values.data();
      widen(from + row * rows.stride(0), dims, v);
      float norm = 1.0f / std::sqrt(kernels().dot(v, v, dims) / dims + eps);
      if (!weight) norm = rounded<T>(norm);
      for (int64_t i = 0; i < dims; ++i) v[i] *= norm;
      if (rounds_first) {
        narrow(v, dims, y);
        widen(y, dims, v);
      }
      if (weight) {
        for (int64_t i = 0; i < dims; ++i) v[i] *= scale[i];
      }
      narrow(v, dims, y);
    }
  });
}

// Copies the dims of each head but `width` from p.first on; for these calls a thread's
// rotate(from, cos, sin, to), which make() returns.
template <typename T, typename Make>
void rotate_heads(const RotationParams& p, int64_t width, const Make& make) {
  const Tensor rows = dense(p.x), cosines = dense(p.cos), sines = dense(p.sin);
  const auto size = rows.sizes(), stride = rows.strides();
  const int64_t dims = size[3], angles = cosines.size(2);
  const T* from = rows.const_data_ptr<T>();
  T* to = p.out.mutable_data_ptr<T>();
  for_rows(size[0] * size[1], size[2] * dims, [&](int64_t begin, int64_t end) {
    AlignedVector<float> cos(angles), sin(angles);
    auto rotate = make();
    for (int64_t token = begin; token < end; ++token) {
      const int64_t b = token / size[1], s = token % size[1];
      const auto load = [&](const Tensor& all, float* of_token) {
        widen(all.const_data_ptr<T>() + b * all.stride(0) + s * all.stride(1), angles, of_token);
      };
      load(cosines, cos.data());
      load(sines, sin.data());
      for (int64_t n = 0; n < size[2]; ++n) {
        const T* source = from + b * stride[0] + s * stride[1] + n * stride[2];
        T* y = to + (token * size[2] + n) * dims;
        std::copy_n(source, p.first, y);
        std::copy_n(source + p.first + width, dims - width - p.first, y + p.first + width);
        rotate(source + p.first, cos.data(), sin.data(), y + p.first);
      }
    }
  });
}

template <typename T>
void rotate(const RotationParams& p) {
  const int64_t width = p.cos.size(2), half = width / 2;
  // of pairs the first half has every angle, and transformers reads no other
  const int64_t upper = p.interleaved ? 0 : half;
  rotate_heads<T>(p, width, [&] {
    return [=, interleaved = p.interleaved, x = AlignedVector<float>(width),
            products = AlignedVector<float>(2 * width), rounded = AlignedVector<T>(2 * width)](
               const T* from, const float* cos, const float* sin, T* to) mutable {
      if (interleaved) {
        for (int64_t i = 0; i < half; ++i) {
          x[i] = static_cast<float>(from[2 * i]);
          x[half + i] = static_cast<float>(from[2 * i + 1]);
        }
      } else {
        widen(from, width, x.data());
      }
      float *straight = products.data(), *crossed = straight + width;
      for (int64_t i = 0; i < half; ++i) {
        straight[i] = x[i] * cos[i];
        straight[half + i] = x[half + i] * cos[upper + i];
        crossed[i] = -x[half + i] * sin[i];
        crossed[half + i] = x[i] * sin[upper + i];
      }
      narrow(products.data(), 2 * width, rounded.data());
      widen(rounded.data(), 2 * width, products.data());
      for (int64_t i = 0; i < width; ++i) straight[i] += crossed[i];
      narrow(straight, width, to);
    };
  });
}

template <typename T>
void rotate_pairs(const RotationParams& p) {
  const int64_t pairs = p.cos.size(2);
  rotate_heads<T>(p, 2 * pairs, [&] {
    return [pairs, x = AlignedVector<float>(2 * pairs)](const T* from, const float* cos,
                                                        const float* sin, T* to) mutable {
      widen(from, 2 * pairs, x.data());
      for (int64_t i = 0; i < pairs; ++i) {
        const float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cos[i] - b * sin[i];
        x[2 * i + 1] = b * cos[i] + a * sin[i];
      }
      narrow(x.data(), 2 * pairs, to);
    };
  });
}

template <typename T>
void add_weighted(const Tensor& x, const float* weights, const Tensor& out) {
  const int64_t k = x.size(1), dims = x.size(2);
  const T* from = x.const_data_ptr<T>();
  T* to = out.mutable_data_ptr<T>();
  for_rows(x.size(0), k * dims, [&](int64_t begin, int64_t end) {
    AlignedVector<float> sum(dims), row(dims);
    for (int64_t token = begin; token < end; ++token) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int64_t i = token * k; i < (token + 1) * k; ++i) {
        widen(from + i * dims, dims, row.data());
        for (int64_t d = 0; d < dims; ++d) sum[d] += weights[i] * row[d];
      }
      narrow(sum.data(), dims, to + token * dims);
    }
  });
}

// As torch.topk: NaN is the largest. Equal ones: the lower index first.
void sort_best(const std::vector<float>& values, int64_t count, std::vector<int64_t>& order) {
  order.resize(values.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int64_t a, int64_t b) {
    const bool nan_a = std::isnan(values[a]), nan_b = std::isnan(values[b]);
    if (nan_a != nan_b) return nan_a;
    return nan_a || values[a] == values[b] ? a < b : values[a] > values[b];
  });
}

// Rounds what transformers rounds.
template <typename T>
void route_roots(const RootRouteParams& p) {
  const int64_t experts = p.logits.size(1), k = p.weights.size(1);
  const float* bias = p.bias.const_data_ptr<float>();
  for_rows(p.logits.size(0), experts, [&](int64_t begin, int64_t end) {
    AlignedVector<float> scores(experts);
    std::vector<float> choice(experts);
    std::vector<int64_t> order;
    for (int64_t row = begin; row < end; ++row) {
      widen(p.logits.const_data_ptr<T>() + row * experts, experts, scores.data());
      for (int64_t e = 0; e < experts; ++e) {
        const float x = scores[e], softplus = x > 20.0f ? x : std::log1p(std::exp(x));
        scores[e] = rounded<T>(std::sqrt(rounded<T>(softplus)));
        choice[e] = scores[e] + bias[e];
      }
      sort_best(choice, k, order);
      float sum = 0.0f;
      for (int64_t i = 0; i < k; ++i) sum += scores[order[i]];
      sum = rounded<T>(rounded<T>(sum) + 1e-20f);
      for (int64_t i = 0; i < k; ++i) {
        const float weight = rounded<T>(scores[order[i]] / sum) * static_cast<float>(p.scale);
        p.weights.mutable_data_ptr<T>()[row * k + i] = static_cast<T>(weight);
      }
      std::copy_n(order.data(), k, p.experts.mutable_data_ptr<int64_t>() + row * k);
    }
  });
}

template <typename T, typename F>
void map_values(const Tensor& x, const Tensor& out, const F& f) {
  const T* from = x.const_data_ptr<T>();
  T* to = out.mutable_data_ptr<T>();
  for_rows(x.numel(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      to[i] = static_cast<T>(f(static_cast<float>(from[i])));
    }
  });
}

}  // namespace

void norm_rows(const Tensor& x, const OptionalTensor& weight, double eps, const Tensor& out) {
  with_type(x.scalar_type(),
            [&](auto type) { norm<decltype(type)>(x, weight, static_cast<float>(eps), out); });
}

void rotate_rows(const RotationParams& p) {
  with_type(p.x.scalar_type(), [&](auto type) { rotate<decltype(type)>(p); });
}

void rotate_pair_rows(const RotationParams& p) {
  with_type(p.x.scalar_type(), [&](auto type) { rotate_pairs<decltype(type)>(p); });
}

void route_rows(const RouteParams& p) {
  const int64_t experts = p.logits.size(1), k = p.weights.size(1), size = experts / p.groups;
  const float* bias = p.bias.const_data_ptr<float>();
  for_rows(p.logits.size(0), experts, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(experts), choice(experts), of_groups(p.groups);
    std::vector<int64_t> order;
    for (int64_t row = begin; row < end; ++row) {
      const float* logits = p.logits.const_data_ptr<float>() + row * experts;
      for (int64_t e = 0; e < experts; ++e) {
        scores[e] = sigmoid(logits[e]);
        choice[e] = scores[e] + bias[e];
      }
      if (p.kept < p.groups) {
        std::vector<float> group(size);
        for (int64_t g = 0; g < p.groups; ++g) {
          std::copy_n(choice.data() + g * size, size, group.data());
          sort_best(group, 2, order);
          of_groups[g] = group[order[0]] + group[order[1]];
        }
        sort_best(of_groups, p.groups, order);
        for (int64_t i = p.kept; i < p.groups; ++i) {
          std::fill_n(choice.data() + order[i] * size, size,
                      -std::numeric_limits<float>::infinity());
        }
      }
      sort_best(choice, k, order);
      float* weights = p.weights.mutable_data_ptr<float>() + row * k;
      float sum = 0.0f;
      for (int64_t i = 0; i < k; ++i) sum += weights[i] = scores[order[i]];
      for (int64_t i = 0; i < k; ++i) {
        if (p.normalize) weights[i] /= sum + 1e-20f;
        weights[i] *= static_cast<float>(p.scale);
      }
      std::copy_n(order.data(), k, p.experts.mutable_data_ptr<int64_t>() + row * k);
    }
  });
}

void route_root_rows(const RootRouteParams& p) {
  with_type(p.logits.scalar_type(), [&](auto type) { route_roots<decltype(type)>(p); });
}

void add_weighted_rows(const Tensor& x, const Tensor& weights, const Tensor& out) {
  with_type(x.scalar_type(), [&](auto type) {
    add_weighted<decltype(type)>(x, weights.const_data_ptr<float>(), out);
  });
}

void activate_values(const Tensor& x, Activation f, const Tensor& out) {
  with_type(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    switch (f) {
      case Activation::kSigmoid:
        return map_values<T>(x, out, [](float v) { return sigmoid(v); });
      case Activation::kSilu:
        return map_values<T>(x, out, [](float v) { return v / (1.0f + std::exp(-v)); });
      default:  // as torch, which leaves large numbers as they are
        return map_values<T>(x, out,
                             [](float v) { return v > 20.0f ? v : std::log1p(std::exp(v)); });
    }
  });
}

}  // namespace custom_pypto
