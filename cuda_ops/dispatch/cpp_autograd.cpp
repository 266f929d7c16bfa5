// Calls an operator and records its gradient in C++, as the autograd.Function of fast_path.py does
// in Python. The nodes of autograd's graph are no part of the stable ABI, so this is compiled for
// one torch, by cpp_autograd.py, which does without it where it is not there.
#include <Python.h>
#include <structmember.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::autograd::VariableInfo;
namespace compiled = torch::dynamo::autograd;
using NodePtr = decltype(Edge::function);  // std::shared_ptr before torch 2.13, then intrusive_ptr

// Where an argument of the gradient comes from.
enum class Source { kInput, kOutput, kGrad };

struct Argument {
  Source source;
  size_t position;
  bool is_tensor;
};

// What is the same in all calls of one operator.
struct Rule {
  c10::OperatorHandle op;
  c10::OperatorName backward;
  std::vector<std::string> taking;  // the names of its arguments
  std::string name;
  c10::DispatchKeySet cpu, cuda;
  std::vector<c10::TypePtr> types;
  std::vector<Argument> arguments;   // of the gradient
  std::vector<size_t> targets;       // for each of its results: the argument that it belongs to
  std::vector<bool> differentiable;  // for each result of the operator
  std::vector<size_t> taken;         // the results whose gradients it takes
  std::vector<size_t> tensors, without_gradient;
  std::vector<bool> is_tensor;  // for each argument of the operator
};

bool has_names(const std::vector<c10::Argument>& arguments, const std::vector<std::string>& names) {
  return std::equal(arguments.begin(), arguments.end(), names.begin(), names.end(),
                    [](const auto& argument, const auto& name) { return argument.name() == name; });
}

// Calls the gradient. Returns nothing for what is not wanted.
variable_list gradients(const Rule& rule, const variable_list& grads, const variable_list& tensors,
                        const std::vector<c10::IValue>& values, const std::vector<bool>& wanted) {
  torch::jit::Stack stack;
  stack.reserve(rule.arguments.size());
  size_t next_tensor = 0, next_value = 0;
  for (const Argument& argument : rule.arguments) {
    if (argument.source == Source::kGrad) {
      stack.emplace_back(grads[argument.position]);
    } else if (argument.is_tensor) {
      stack.emplace_back(tensors[next_tensor++]);
    } else {
      stack.emplace_back(values[next_value++]);
    }
  }
  const auto op = c10::Dispatcher::singleton().findSchema(rule.backward);
  TORCH_CHECK(op.has_value() && has_names(op->schema().arguments(), rule.taking) &&
                  op->schema().returns().size() == rule.targets.size(),
              rule.backward.name,
              " takes other arguments since a reload, and what its forward kept is for those "
              "before: call the forward again");
  if (at::GradMode::is_enabled()) {
    op->callBoxed(&stack);
  } else {
    const at::AutoDispatchBelowADInplaceOrView below;  // a gradient of this is not wanted
    op->callBoxed(&stack);
  }
  variable_list result(wanted.size());
  for (size_t k = 0; k < rule.targets.size(); ++k) {
    if (wanted[k]) result[k] = stack[k].toTensor();
  }
  return result;
}

// The node of the graph: gradients of the results in, gradients of Rule::targets out.
struct Gradient : Node {
  std::shared_ptr<const Rule> rule;
  std::vector<SavedVariable> saved;
  std::vector<c10::IValue> values;

  std::string name() const override { return rule->name; }

  variable_list apply(variable_list&& grads) override {
    variable_list tensors;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      tensors = unpacked();
    }
    for (const size_t k : rule->taken) {
      if (!grads[k].defined()) grads[k] = input_metadata(k).zeros_like();
    }
    return gradients(*rule, grads, tensors, values, wanted());
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& variable : saved) variable.reset_data();
  }

  // For compiled autograd, which traces a function that it gives what is saved here, as CppNode of
  // torch's custom_function.h does.
  void compiled_args(compiled::CompiledNodeArgs& args) const override {
    args.collect(rule->backward.name);  // with its namespace: the key of what was traced
    size_t next = 0;
    for (const Argument& argument : rule->arguments) {
      if (argument.source == Source::kGrad || !argument.is_tensor) continue;
      args.collect(saved[next++], argument.source == Source::kOutput);
    }
    for (const c10::IValue& value : values) args.collect(value);
    args.collect(results());
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 compiled::SwapSavedVariables& swapped) override {
    std::vector<VariableInfo> infos = results();
    for (SavedVariable& variable : saved) swapped.before(variable);
    for (c10::IValue& value : values) swapped.before(value);
    swapped.before(infos);
    compiled::PackedArgs packed;
    packed.pack(unpacked());
    packed.pack(infos);
    packed.pack(wanted());
    std::vector<c10::IValue> args = packed.vec();
    const size_t count = args.size();
    args.insert(args.end(), values.begin(), values.end());
    std::vector<c10::TypePtr> types;
    for (const c10::IValue& arg : args) types.push_back(arg.type());
    const auto traced = [rule = rule, count](const variable_list& grads,
                                             const std::vector<c10::IValue>& given) {
      compiled::PackedArgs packed(std::vector<c10::IValue>(given.begin(), given.begin() + count));
      const auto tensors = packed.unpack<variable_list>();
      const auto infos = packed.unpack<std::vector<VariableInfo>>();
      const auto wanted = packed.unpack<std::vector<bool>>();
      const std::vector<c10::IValue> values(given.begin() + count, given.end());
      variable_list whole(grads);
      at::OptionalDeviceGuard guard;
      for (const size_t k : rule->taken) {
        if (!whole[k].defined()) whole[k] = infos[k].zeros(guard);
      }
      return gradients(*rule, whole, tensors, values, wanted);
    };
    const auto& interface = compiled::getPyCompilerInterface();
    const std::string bound =
        interface->bind_function(swapped.get_py_compiler(), rule->name, traced, types, true, true);
    const auto metadata =
        compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            compiled::get_input_metadata(next_edges()));
    variable_list result = interface->call_function(swapped.get_py_compiler(), "apply_functional",
                                                    bound, grads, args, metadata);
    for (SavedVariable& variable : saved) swapped.after(variable);
    for (c10::IValue& value : values) swapped.after(value);
    swapped.after(infos);
    return result;
  }

 private:
  variable_list unpacked() {
    variable_list tensors;
    for (SavedVariable& variable : saved) tensors.push_back(variable.unpack(self(this)));
    return tensors;
  }

  // For each gradient that is computed: whether it is wanted.
  std::vector<bool> wanted() {
    std::vector<bool> found;
    for (size_t k = 0; k < num_outputs(); ++k) found.push_back(task_should_compute_output(k));
    return found;
  }

  // What a result of the operator was like, to make a gradient of zeros.
  std::vector<VariableInfo> results() const {
    std::vector<VariableInfo> infos(num_inputs());
    for (VariableInfo& info : infos) info.requires_grad = info.is_empty = false;
    for (const size_t k : rule->taken) {
      const auto& metadata = input_metadata(k);
      infos[k].layout = metadata.layout();
      infos[k].device = metadata.device();
      infos[k].scalar_type = c10::typeMetaToScalarType(metadata.dtype());
      const auto& sizes = metadata.shape_as_dim_vector();
      infos[k].size.assign(sizes.begin(), sizes.end());
    }
    return infos;
  }

  template <class Ptr = NodePtr, class This>
  static Ptr self(This* node) {
    if constexpr (std::is_same_v<Ptr, std::shared_ptr<Node>>) {
      return node->shared_from_this();
    } else {
      return Ptr::unsafe_reclaim_from_nonowning(node);
    }
  }
};

template <class Ptr = NodePtr>
Ptr new_node(Node* node) {
  if constexpr (std::is_same_v<Ptr, std::shared_ptr<Node>>) {
    // torch's own deleter: a long chain of nodes must not be freed by recursion.
    return Ptr(node, [](auto* unused) { deleteNode(unused); });
  } else {
    return Ptr::unsafe_steal_from_new(node);
  }
}

at::Tensor another_of(const at::Tensor& x) {
  const at::AutoGradMode no_gradient(false);
  return x.view_as(x);
}

// Runs the operator on the stack, and records its gradient.
void call(const std::shared_ptr<const Rule>& rule, torch::jit::Stack& stack) {
  const std::vector<c10::IValue> given(stack.begin(), stack.end());
  auto* made = new Gradient;
  const NodePtr node = new_node(made);
  made->rule = rule;
  torch::autograd::edge_list edges;
  for (const size_t target : rule->targets) {
    const c10::IValue& value = given[target];
    edges.push_back(value.isTensor() ? torch::autograd::impl::gradient_edge(value.toTensor())
                                     : Edge());
  }
  made->set_next_edges(std::move(edges));
  {
    // As in the forward of an autograd.Function: what the kernel calls records nothing.
    const at::AutoGradMode no_gradient(false);
    const at::AutoDispatchBelowADInplaceOrView below;
    const bool cuda = given[rule->tensors[0]].toTensor().is_cuda();
    rule->op.redispatchBoxed(cuda ? rule->cuda : rule->cpu, &stack);
  }
  for (size_t k = 0; k < stack.size(); ++k) {
    for (const size_t i : rule->tensors) {  // what is given back as it is must stay what it is
      if (stack[k].toTensor().is_same(given[i].toTensor()))
        stack[k] = another_of(given[i].toTensor());
    }
    const at::Tensor& out = stack[k].toTensor();
    if (rule->differentiable[k] && torch::autograd::isDifferentiableType(out.scalar_type())) {
      torch::autograd::set_history(out, node);
    } else {
      made->add_input_metadata(Node::undefined_input());
    }
  }
  for (const Argument& argument : rule->arguments) {
    if (argument.source == Source::kGrad) continue;
    const bool output = argument.source == Source::kOutput;
    const c10::IValue& value = (output ? stack : given)[argument.position];
    if (argument.is_tensor) {
      made->saved.emplace_back(value.toTensor(), output);
    } else {
      made->values.push_back(value);
    }
  }
}

// --- what Python sees
// -----------------------------------------------------------------------------

struct Callable {
  PyObject_HEAD vectorcallfunc vectorcall;
  std::shared_ptr<const Rule> rule;
  PyObject* otherwise;  // what is called where an argument without a gradient requires one
};

// Puts what is no tensor on the stack; false if it is not of the type.
bool push(PyObject* value, const c10::TypePtr& type, torch::jit::Stack& stack) {
  try {
    stack.push_back(torch::jit::toIValue(value, type));
    return true;
  } catch (const std::exception&) {
    PyErr_Clear();
    return false;
  }
}

PyObject* callable_call(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  auto* callable = reinterpret_cast<Callable*>(self);
  const auto rule = callable->rule;  // a reload may replace it while the operator runs
  const auto count = static_cast<size_t>(PyVectorcall_NARGS(flags));
  if (names != nullptr || count != rule->types.size()) {
    return PyObject_Vectorcall(callable->otherwise, args, flags, names);
  }
  for (const size_t i : rule->without_gradient) {
    if (THPVariable_Unpack(args[i]).requires_grad()) {
      return PyObject_Vectorcall(callable->otherwise, args, flags, names);
    }
  }
  torch::jit::Stack stack;
  stack.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    if (rule->is_tensor[i]) {
      stack.emplace_back(THPVariable_Unpack(args[i]));  // fast_path.py has looked at its type
    } else if (!push(args[i], rule->types[i], stack)) {
      return PyObject_Vectorcall(callable->otherwise, args, flags, names);  // raises by name
    }
  }
  {
    const pybind11::gil_scoped_release released;
    call(rule, stack);
  }
  if (stack.size() == 1) return THPVariable_Wrap(stack[0].toTensor());
  pybind11::tuple results(stack.size());
  for (size_t k = 0; k < stack.size(); ++k) {
    PyObject* result = THPVariable_Wrap(stack[k].toTensor());
    if (result == nullptr) return nullptr;
    PyTuple_SET_ITEM(results.ptr(), static_cast<Py_ssize_t>(k), result);
  }
  return results.release().ptr();
  END_HANDLE_TH_ERRORS
}

void callable_dealloc(PyObject* self) {
  auto* callable = reinterpret_cast<Callable*>(self);
  PyTypeObject* type = Py_TYPE(self);
  callable->rule.~shared_ptr();
  Py_XDECREF(callable->otherwise);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMemberDef callable_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Callable, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot callable_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(callable_dealloc)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, callable_members},
    {0, nullptr},
};
PyType_Spec callable_spec = {"cuda_ops.dispatch.cpp_autograd.Callable", sizeof(Callable), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, callable_slots};
PyObject* callable_type = nullptr;

std::vector<size_t> positions(const pybind11::handle& listed) {
  return listed.cast<std::vector<size_t>>();
}

c10::DispatchKeySet keys_of(const pybind11::handle& raw) {
  return {c10::DispatchKeySet::RAW, raw.cast<uint64_t>()};
}

PyObject* make(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  const auto args = pybind11::reinterpret_borrow<pybind11::tuple>(given);
  const auto name = args[0].cast<std::string>();
  auto rule =
      std::make_shared<Rule>(Rule{c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), ""),
                                  c10::OperatorName(args[1].cast<std::string>(), "")});
  rule->taking = args[11].cast<std::vector<std::string>>();  // it may not be registered yet
  rule->name = args[2].cast<std::string>();
  rule->cpu = keys_of(args[3]);
  rule->cuda = keys_of(args[4]);
  for (const auto& argument : rule->op.schema().arguments()) {
    rule->types.push_back(argument.real_type());
    rule->is_tensor.push_back(argument.real_type()->kind() == c10::TypeKind::TensorType);
  }
  for (const auto& part : args[5]) {
    const auto one = pybind11::reinterpret_borrow<pybind11::tuple>(part);
    const auto kind = one[0].cast<std::string>();
    rule->arguments.push_back({kind == "input"    ? Source::kInput
                               : kind == "output" ? Source::kOutput
                                                  : Source::kGrad,
                               one[1].cast<size_t>(), one[2].cast<bool>()});
  }
  for (const Argument& argument : rule->arguments) {
    if (argument.source == Source::kGrad) rule->taken.push_back(argument.position);
  }
  rule->targets = positions(args[6]);
  rule->differentiable = args[7].cast<std::vector<bool>>();
  rule->tensors = positions(args[8]);
  rule->without_gradient = positions(args[9]);
  auto* type = reinterpret_cast<PyTypeObject*>(callable_type);
  auto* callable = reinterpret_cast<Callable*>(type->tp_alloc(type, 0));
  if (callable == nullptr) return nullptr;
  callable->vectorcall = callable_call;
  new (&callable->rule) std::shared_ptr<const Rule>(std::move(rule));
  callable->otherwise = pybind11::object(args[10]).release().ptr();
  return reinterpret_cast<PyObject*>(callable);
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {{"make", make, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "cpp_autograd",
                          nullptr,
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_cpp_autograd() {
  callable_type = PyType_FromSpec(&callable_spec);
  return callable_type == nullptr ? nullptr : PyModule_Create(&definition);
}
