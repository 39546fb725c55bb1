"""Evaluates calls while a function is walked: what they return, and whom they call."""

import ast

from zdtrain.lint import infer as i
from zdtrain.lint import kinds as k
from zdtrain.lint import results as r
from zdtrain.lint.expressions import Walk
from zdtrain.lint.kinds import Kind, Kinds
from zdtrain.lint.source import Class, Function
from zdtrain.lint.walked import CallEdge


class Calls(Walk):
    """Calls of methods, functions, modules and builtins."""

    def _call(self, node: ast.Call) -> Kinds:
        arguments = [self.value(argument) for argument in node.args]
        for item in node.keywords:
            self.infer(item.value)
            for rule in self.rules.on_keyword.get(item.arg or "", ()):
                rule.check_keyword(node, item.value, self)
        function = node.func
        if isinstance(function, ast.Attribute):
            return self._attribute_call(node, function, arguments)
        if isinstance(function, ast.Name):
            return self._name_call(node, function.id, arguments)
        called = self.value(function)
        return k.TENSOR | k.OUTPUT | self._graph() if called & k.MODULE else k.UNKNOWN

    def _graph(self) -> Kind:
        self.calls_module = True
        return 0 if self.no_grad else k.GRAPH

    def _attribute_call(self, node: ast.Call, function: ast.Attribute, arguments: list[Kind]) -> Kinds:
        root: ast.expr = function
        while root.__class__ is ast.Attribute:
            root = root.value
        name = self.dotted(function) if isinstance(root, ast.Name) else ""
        if (
            isinstance(root, ast.Name)
            and root.id not in self.env
            and (root.id in self.source.imports or name.partition(".")[0] in ("torch", "numpy", "math", "lightning"))
        ):
            for rule in self.rules.on_call.get(name, ()):
                rule.check_call(node, name, self)
            for rule in self.rules.on_method.get(function.attr, ()):
                rule.check_call(node, name, self)
            return self._library_call(node, name, arguments)
        self._applied[function.value] = function.attr
        owner = self.infer(function.value)
        for rule in self.rules.on_method.get(function.attr, ()):
            rule.check_call(node, function.attr, self)
        return self._method_call(node, function, i.flat(owner), arguments)

    def _library_call(self, node: ast.Call, name: str, arguments: list[Kind]) -> Kinds:
        for rule in self.rules.on_library.get(name.partition(".")[0], ()):
            rule.check_call(node, name, self)
        self.result.calls.append(CallEdge(name, self.place))
        if name.startswith("torch."):
            kind = r.torch_function(name, node, arguments)
            return i.flat(kind) & ~k.GRAPH if self.no_grad and not isinstance(kind, tuple) else kind
        if name.startswith(
            ("numpy.", "math.", "random.", "time.", "os.", "json.", "logging.", "re.", "sys.", "datetime.")
        ):
            return k.VALUE | (k.ARRAY if name.startswith("numpy.") else 0)
        if name.startswith(i.TENSOR_LIBRARIES):
            return self._tensor_library(name, arguments)
        last = name.rpartition(".")[2]
        if last in i.WRAPPERS and arguments:
            return arguments[0]
        return self._named_result(last, arguments)

    @staticmethod
    def _tensor_library(name: str, arguments: list[Kind]) -> Kind:
        if "models" in name:
            return k.MODULE
        is_function = name.rpartition(".")[2][:1].islower() and ".transforms" not in name
        return k.TENSOR if is_function and any(argument & k.TENSOR for argument in arguments) else k.UNKNOWN

    def _named_result(self, name: str, arguments: list[Kind]) -> Kind:
        """What a call to something unknown gives, by its name."""
        if name.endswith(("DataLoader", "dataloader")):
            return k.LOADER
        if name in ("deepcopy", "copy"):
            return arguments[0] if arguments else k.UNKNOWN
        if i.names_module(name) and any(a & (k.TENSOR | k.TENSORS | k.OUTPUT) for a in arguments):
            return k.TENSOR | k.OUTPUT | self._graph()
        if name.endswith("loss") and any(a & (k.TENSOR | k.OUTPUT) for a in arguments):
            return k.TENSOR | self._graph()
        if name == "Variable" and arguments:
            return arguments[0]
        return k.UNKNOWN

    def _method_call(self, node: ast.Call, function: ast.Attribute, owner: Kind, arguments: list[Kind]) -> Kinds:
        name = function.attr
        if self.is_self(function.value) and self.owner is not None:
            if name in ("register_buffer", "register_parameter", "add_state") and node.args:
                self._register(node.args[0])
            return self._self_call(name, arguments)
        if isinstance(function.value, ast.Call) and getattr(function.value.func, "id", "") == "super":
            self._super_call(name, arguments)
            return k.TENSOR | k.OUTPUT if name == "forward" else k.UNKNOWN
        if isinstance(function.value, ast.Name) and function.value.id in self.instances:
            found = self._instance_call(self.instances[function.value.id], name, arguments)
            if found is not None:
                return found
        if owner & (k.TENSOR | k.OUTPUT):
            if name == "format":
                return k.VALUE
            return r.tensor_method(owner, name, node)
        if owner & k.MODULE:
            return self._module_method(name, arguments)
        if name == "format" and owner & k.VALUE:
            for argument in [*node.args, *(item.value for item in node.keywords)]:
                self._formatted(argument)
            return k.VALUE
        if owner & k.TENSORS:
            return self._container_method(name, owner)
        if name in ("append", "extend", "add") and isinstance(function.value, ast.Name) and arguments:
            if arguments[0] & (k.TENSOR | k.TENSORS) and not owner & k.ARRAY:
                self.env[function.value.id] = k.TENSORS | (arguments[0] & (k.GRAPH | k.ON_HOST | k.SCALAR))
            return k.VALUE
        if owner & (k.VALUE | k.SCHEDULER | k.OPTIMIZER):
            return k.VALUE
        if owner & k.SCALER:
            return arguments[0] if name == "scale" and arguments else k.UNKNOWN
        if name == "cpu":
            return k.TENSOR | k.ON_HOST
        if name in i.TENSOR_ONLY:
            return r.tensor_method(k.TENSOR, name, node)
        if owner & k.LOADER:
            return owner if name in ("__iter__",) else k.UNKNOWN
        return self._named_result(name, arguments)

    def _register(self, name: ast.expr) -> None:
        """``self.register_buffer("name", …)``: from now on ``self.name`` is a tensor."""
        if self.owner is not None and isinstance(name, ast.Constant) and isinstance(name.value, str):
            self.owner.attributes[name.value] = k.TENSOR

    def _module_method(self, name: str, arguments: list[Kind]) -> Kind:
        if name in ("parameters", "buffers"):
            return k.TENSORS
        if name in (
            "train",
            "eval",
            "to",
            "cuda",
            "cpu",
            "half",
            "float",
            "requires_grad_",
            "apply",
            "share_memory",
            "double",
        ):
            return k.MODULE
        if i.names_value(name):
            return k.VALUE
        if any(argument & (k.TENSOR | k.TENSORS | k.OUTPUT) for argument in arguments):
            return k.TENSOR | k.OUTPUT | self._graph()
        return k.UNKNOWN

    def _container_method(self, name: str, owner: Kind) -> Kind:
        if name in ("get", "pop", "popleft", "setdefault"):
            return i.element(owner)
        if name in ("values", "items", "copy", "to", "cuda"):
            return owner & ~k.ON_HOST if name in ("to", "cuda") else owner
        return k.VALUE if name in ("keys", "append", "extend", "update", "clear", "index") else k.UNKNOWN

    def _self_call(self, name: str, arguments: list[Kind]) -> Kinds:
        assert self.owner is not None
        method = self.source.method(self.owner, name)
        if method is not None:
            return self._local_call(method, arguments)
        self._inherited_call(self.owner, name)
        self.unit.construct(self.owner)
        for current in self.source.base_classes(self.owner):
            built = current.instances.get(name)
            if built:
                found = self._instance_call(built, "", arguments)
                if found is not None:
                    return found
        kind = self._self_attribute(name)
        if kind & k.MODULE:
            return k.TENSOR | k.OUTPUT | self._graph()
        if name == "optimizers":
            return k.OPTIMIZER
        if name in ("register_buffer", "log", "log_dict", "manual_backward", "print", "parameters", "all_gather"):
            return k.TENSORS if name == "parameters" else k.VALUE
        return self._named_result(name, arguments)

    def _inherited_call(self, owner: Class, name: str) -> None:
        """A method that only a base class in another file can have."""
        for base in self.source.outside_bases(owner):
            self.result.calls.append(CallEdge(f"{base}.{name}", self.place))

    def _super_call(self, name: str, arguments: list[Kind]) -> None:
        if self.owner is None:
            return
        for base in self.source.base_classes(self.owner):
            if base is not self.owner and name in base.methods:
                self._local_call(base.methods[name], arguments)
                return
        self._inherited_call(self.owner, name)

    def _instance_call(self, built: str, method: str, arguments: list[Kind]) -> Kinds | None:
        """A call on an instance of a class, here or in another file; an empty `method` calls the instance itself."""
        owner = self.source.classes.get(built.rpartition(".")[2]) if "." not in built or built.startswith(".") else None
        if owner is None:
            owner = self.source.classes.get(built)
        if owner is None:
            if "." in built and not built.startswith(("torch.", "lightning.", "numpy.")):
                for name in (method,) if method else ("forward", "__call__"):
                    self.result.calls.append(CallEdge(f"{built}.{name}", self.place))
            return None
        for name in (method,) if method else ("forward", "__call__"):
            found = self.source.method(owner, name)
            if found is not None:
                kind = self._local_call(found, arguments)
                return kind if i.flat(kind) or name != "forward" else k.TENSOR | k.OUTPUT | self._graph()
        return None

    def _local_call(self, function: Function, arguments: list[Kind]) -> Kinds:
        self.result.calls.append(CallEdge(function, self.place))
        return self.unit.returns(function, tuple(arguments))

    def _name_call(self, node: ast.Call, name: str, arguments: list[Kind]) -> Kinds:
        alias = self._alias(name)
        dotted = alias or self.source.imports.get(name, name)
        for rule in self.rules.on_call.get(dotted, ()):
            rule.check_call(node, dotted, self)
        for rule in self.rules.on_method.get(name, ()) if "." in dotted else ():
            rule.check_call(node, dotted, self)
        if alias:
            return self._library_call(node, alias, arguments)
        nested = self._nested(name)
        if nested is not None:
            return self._local_call(nested, arguments)
        if name == "self" and self.owner is not None:
            forward = self.source.method(self.owner, "forward")
            if forward is not None:
                kind = self._local_call(forward, arguments)
                return kind if i.flat(kind) else k.TENSOR | k.OUTPUT | self._graph()
            return k.TENSOR | k.OUTPUT | self._graph()
        if name in self.source.functions:
            return self._local_call(self.source.functions[name], arguments)
        if name in self.source.classes:
            return k.MODULE if self.source.is_module(self.source.classes[name]) else k.UNKNOWN
        if name in self.instances:
            found = self._instance_call(self.instances[name], "", arguments)
            if found is not None:
                return found
        if name in self.source.imports:
            return self._library_call(node, dotted, arguments)
        called = self.env.get(name) or self.unit.global_kind(name)
        if called & k.MODULE:
            return k.TENSOR | k.OUTPUT | self._graph()
        return self._builtin(node, name, arguments)

    def _alias(self, name: str) -> str:
        """The library function that a variable is another name of; empty if it is none."""
        if name in self.env:
            return self.aliases.get(name, "")
        body = self.unit.walks.get(self.source.body)
        return body.aliases.get(name, "") if body is not None else ""

    def _nested(self, name: str) -> Function | None:
        function: Function | None = self.function
        while function is not None:
            if name in function.nested:
                return function.nested[name]
            function = function.parent
        return None

    def _builtin(self, node: ast.Call, name: str, arguments: list[Kind]) -> Kinds:
        first = arguments[0] if arguments else k.UNKNOWN
        if name in ("str", "repr", "format") and node.args:
            self._formatted(node.args[0])
        if name == "next":
            return i.element(first)
        if name in ("sum", "max", "min", "abs"):
            if first & k.TENSORS and len(arguments) == 1:
                return k.TENSOR | (first & (k.GRAPH | k.ON_HOST | k.SCALAR))
            return _extreme(arguments)
        if name in i.HOST_BUILTINS:
            return k.VALUE
        if name in i.WRAPPERS or name in ("enumerate", "zip", "dict", "set", "deque", "filter"):
            return first if arguments else k.VALUE
        if name == "map" and len(arguments) > 1:
            return arguments[1]
        return self._named_result(name, arguments)


def _extreme(arguments: list[Kind]) -> Kind:
    """``max(a, b)``: a tensor if one of them is."""
    result = k.UNKNOWN
    if arguments and all(argument & k.VALUE for argument in arguments):
        return k.VALUE
    for argument in arguments:
        if argument & k.TENSOR:
            result = k.TENSOR | (argument & (k.GRAPH | k.ON_HOST))
    return result
