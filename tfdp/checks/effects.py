"""What operations do beside computing their outputs, and what they are made of."""

import tensorflow as tf

from tfdp.rules.uses import has_functions

# Of what runs outside of TensorFlow, or keeps what is no variable.
MEMORY = "may keep what depends on the data"

# Operations that TensorFlow counts as stateful, but that keep nothing of their inputs.
_HARMLESS = (
    "Random",
    "Multinomial",
    "Truncated",
    "VarHandle",
    "ReadVariable",
    "Placeholder",
    "VarIsInitialized",
    "VariableShape",
    "DisableCopyOnRead",
    "DeepCopy",
    "DeviceIndex",
    "GuaranteeConst",
    "CudnnRNN",
    "StatelessRandomGet",
    "NonDeterministicInts",
    "SampleDistortedBoundingBox",
    "LookupTableExport",
    "TensorList",
    "Empty",
    "Parameterized",
    "Anonymous",
    "HashTable",
    "MutableHashTable",
    "LookupTableFind",
    "LookupTableSize",
    "ResourceGather",
)

# Operations that TensorFlow does not count as stateful, but that change what a handle
# leads to.
_ON_HANDLES = ("TensorArray", "Queue", "Stack", "Barrier")


def has_effect(op: tf.Operation) -> bool:
    """Tell whether an operation may do more than compute its outputs."""
    found = _effects.get(op.type)
    if found is None:
        definition = op.op_def
        changes = any(argument.is_ref for argument in definition.input_arg)
        keeps = definition.is_stateful and not op.type.startswith(_HARMLESS)
        # What a function in it does is not known: those of calls, branches and loops
        # are looked at before.
        found = changes or keeps or has_functions(op) or op.type.startswith(_ON_HANDLES)
        _effects[op.type] = found
    return found


# By the type of operation: to ask TensorFlow takes long.
_effects: dict[str, bool] = {}

# What tells of tensors how long they are, or what variables are.
_NO_DATA = ("ReadVariableOp", "RngReadAndSkip", "Shape", "ShapeN", "Size")


def is_of_data(op: tf.Operation) -> bool:
    """Tell whether numbers come from more than constants, variables, and lengths."""
    stack, seen = [op], {op.name}
    while stack:
        op = stack.pop()
        if op.type in _NO_DATA:
            continue
        if not op.inputs and op.type != "Const":
            return True
        stack += [each.op for each in op.inputs if each.op.name not in seen]
        seen |= {each.op.name for each in op.inputs}
    return False
