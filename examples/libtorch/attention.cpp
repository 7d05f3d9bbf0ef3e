// Exact and linear attention from C++, forward and backward, beside at::scaled_dot_product_attention and torch's autograd in float64.
// Prints a line for each comparison; exits with 1 if one of them is off, and with 2 if it could not be made.

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/tril.h>

#include <cstdio>
#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "operators.h"

namespace ta = tiled_attention;

namespace {

int misses = 0;

double largest(const at::Tensor& tensor) { return tensor.to(at::kDouble).abs().max().item<double>(); }
double error(const at::Tensor& actual, const at::Tensor& exact) { return largest(actual.detach().to(at::kDouble) - exact.detach()); }

void report(const std::string& name, double found, double allowed) {
  const bool right = found <= allowed;  // false for NaN
  misses += !right;
  std::printf("%-58s error %.1e, allowed %.1e%s\n", name.c_str(), found, allowed, right ? "" : "  WRONG");
}

// The same computation by torch has an error as well: up to four times that, and a unit in the last place of the largest element.
void compare(const std::string& name, const at::Tensor& actual, const at::Tensor& torchs, const at::Tensor& exact) {
  const double unit = actual.scalar_type() == at::kFloat ? 0x1p-23 : 0x1p-7;
  report(name, error(actual, exact), 4 * error(torchs, exact) + unit * largest(exact));
}

// A formula in torch's operators, and its gradients for query, key and value by autograd.
using Formula = std::function<at::Tensor(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value)>;
struct Answer {
  at::Tensor out, query, key, value;
};
Answer ask(const Formula& formula, const ta::AttentionArguments& inputs, const at::Tensor& grad_out, at::ScalarType dtype) {
  const auto leaf = [&](const at::Tensor& tensor) { return tensor.detach().to(dtype, false, true).requires_grad_(); };
  const at::Tensor query = leaf(inputs.query), key = leaf(inputs.key), value = leaf(inputs.value);
  const at::Tensor out = formula(query, key, value);
  out.backward(grad_out.to(dtype));
  return {out, query.grad(), key.grad(), value.grad()};
}

void compare(const std::string& name, const Answer& ours, const Formula& formula, const ta::AttentionArguments& inputs, const at::Tensor& grad_out) {
  const Answer exact = ask(formula, inputs, grad_out, at::kDouble), torchs = ask(formula, inputs, grad_out, inputs.query.scalar_type());
  compare(name + ", out", ours.out, torchs.out, exact.out);
  compare(name + ", grad_query", ours.query, torchs.query, exact.query);
  compare(name + ", grad_key", ours.key, torchs.key, exact.key);
  compare(name + ", grad_value", ours.value, torchs.value, exact.value);
}

// (batch, num_heads, seqlen, head_dim), 4 heads of query on 2 of key and value.
ta::AttentionArguments make_inputs(int64_t seqlen_q, int64_t seqlen_kv, at::ScalarType dtype) {
  const auto draw = [&](int64_t num_heads, int64_t seqlen) { return at::randn({2, num_heads, seqlen, 32}).to(dtype); };
  return {draw(4, seqlen_q), draw(2, seqlen_kv), draw(2, seqlen_kv)};
}

constexpr int64_t kAll = ta::kGradQuery | ta::kGradKey | ta::kGradValue;

void exact_attention(const std::string& name, const ta::AttentionArguments& arguments, const Formula& formula) {
  const at::Tensor grad_out = at::randn_like(arguments.query);
  const ta::AttentionResults results = ta::attention_fwd(arguments, true);
  const ta::AttentionGradients gradients = ta::attention_bwd(grad_out, std::nullopt, arguments, results, kAll);
  compare(name, {results.out, gradients.query, gradients.key, gradients.value}, formula, arguments, grad_out);
}

void exact_attention() {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const std::string name = dtype == at::kFloat ? "exact, float32" : "exact, bfloat16";
    exact_attention(name, make_inputs(70, 90, dtype), [](const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
      return at::scaled_dot_product_attention(query, key, value, std::nullopt, 0.0, false, std::nullopt, true);
    });

    ta::AttentionArguments arguments = make_inputs(80, 80, dtype);
    ta::Intervals causal;
    causal.limit_right = 0;
    arguments.intervals = causal.list();
    exact_attention(name + ", causal", arguments, [](const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
      return at::scaled_dot_product_attention(query, key, value, std::nullopt, 0.0, true, std::nullopt, true);
    });
  }
}

// softmax is replaced by phi(q) . phi(k) / sum, phi(x) = elu(x) + 1.
at::Tensor linear_formula(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, bool causal) {
  const int64_t ratio = query.size(1) / key.size(1);
  const at::Tensor mapped = (at::elu(key) + 1).repeat_interleave(ratio, 1);
  at::Tensor weights = at::matmul(at::elu(query) + 1, mapped.transpose(-2, -1));
  if (causal) weights = at::tril(weights);
  return at::matmul(weights / weights.sum(-1, true), value.repeat_interleave(ratio, 1));
}

void linear_attention() {
  for (const bool causal : {false, true}) {
    const ta::AttentionArguments inputs = make_inputs(80, 80, at::kFloat);
    ta::LinearArguments arguments{inputs.query, inputs.key, inputs.value};
    arguments.causal = causal;
    const at::Tensor grad_out = at::randn_like(inputs.query);
    const ta::LinearResults results = ta::linear_attention_fwd(arguments);
    const ta::LinearGradients gradients = ta::linear_attention_bwd(grad_out, std::nullopt, std::nullopt, arguments, kAll);
    const Formula formula = [&](const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) { return linear_formula(query, key, value, causal); };
    const Answer ours{results.out, gradients.query, gradients.key, gradients.value};
    compare(causal ? "linear, float32, causal" : "linear, float32", ours, formula, inputs, grad_out);
  }
}

// What torch::autograd::Function makes of the two operators has the same numbers.
void autograd() {
  ta::AttentionArguments arguments = make_inputs(70, 90, at::kFloat);
  const at::Tensor grad_out = at::randn_like(arguments.query);
  const Formula formula = [&](const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
    return ta::DifferentiableAttention::apply(query, key, value, arguments.intervals);
  };
  const Answer differentiated = ask(formula, arguments, grad_out, at::kFloat);
  const ta::AttentionResults results = ta::attention_fwd(arguments, true);
  const ta::AttentionGradients gradients = ta::attention_bwd(grad_out, std::nullopt, arguments, results, kAll);
  const std::pair<at::Tensor, at::Tensor> pairs[] = {
      {differentiated.out, results.out}, {differentiated.query, gradients.query}, {differentiated.key, gradients.key}, {differentiated.value, gradients.value}};
  double difference = 0;
  for (const auto& [one, other] : pairs) difference += largest(one.detach() - other);
  report("torch::autograd::Function, difference from the operators", difference, 0);
}

// The operators alone know no autograd: torch warns in backward, and nothing arrives.
void without_autograd() {
  struct Count : c10::WarningHandler {
    int warnings = 0;
    std::string text;
    void process(const c10::Warning& warning) override { ++warnings, text = warning.msg(); }
  } count;
  const ta::AttentionArguments inputs = make_inputs(8, 8, at::kFloat);
  const at::Tensor query = inputs.query.requires_grad_();
  const at::Tensor out = ta::attention_fwd(inputs, true).out;
  {
    const c10::WarningUtils::WarningHandlerGuard guard(&count);
    const c10::WarningUtils::WarnAlways always;
    if (out.requires_grad()) out.sum().backward();
  }
  misses += query.grad().defined() || count.warnings == 0;
  std::printf("attention_fwd alone: %s gradient; torch says: %s\n", query.grad().defined() ? "a" : "no", count.text.c_str());
}

void wrong_argument() {
  ta::AttentionArguments arguments = make_inputs(8, 8, at::kFloat);
  arguments.value = arguments.value.slice(2, 0, 7);
  try {
    ta::attention_fwd(arguments, false);
    ++misses;
  } catch (const std::exception& refusal) {
    const std::string text = refusal.what();
    misses += text.find("value must have the num_heads_kv and seqlen_kv of key") == std::string::npos;
    std::printf("a value of the wrong length: %s\n", text.substr(0, text.find('\n')).c_str());
  }
}

}  // namespace

int main() try {
  at::manual_seed(0);
  std::printf("kernels for %s\n", ta::instruction_set().c_str());
  exact_attention();
  linear_attention();
  autograd();
  without_autograd();
  wrong_argument();
  std::printf(misses ? "%d wrong\n" : "all right\n", misses);
  return misses ? 1 : 0;
} catch (const std::exception& problem) {
  std::fprintf(stderr, "%s\n", problem.what());
  return 2;
}
