"""Records what each layer's call computes, as its rule says, during a forward pass."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import MappingProxyType

import keras
import tensorflow as tf

from tfdp import _keras
from tfdp._tracing import note_loop, tracing
from tfdp._types import Nest, Tensor, Variable
from tfdp.errors import UnsupportedLayerError
from tfdp.rules.call import Call, Terms
from tfdp.rules.elsewhere import Met, has_recorded, met
from tfdp.rules.free import Free
from tfdp.rules.lengths import Lengths
from tfdp.rules.moves import Moves
from tfdp.rules.own_gradients import OwnGradients, OwnGradientsError
from tfdp.rules.places import NotedPlaces, Place, Places
from tfdp.rules.registry import (
    Rule,
    find,
    is_leaf,
    loops_over_a_cell,
    own_variables,
)
from tfdp.rules.rows_first import called_rows_first
from tfdp.rules.unrolling import loops_run_by, unrolled, while_loop
from tfdp.rules.uses import Followed, NotFollowedError, Pass, Use, named
from tfdp.rules.variable_tapes import VariableTapes, used_elsewhere
from tfdp.rules.watched import Watched
from tfdp.rules.whole_loops import WholeLoops


class Recording:
    """A forward pass whose layers are called by their rules.

    No trainable variable escapes: a second tape sees those that are used outside of
    the calls of their own layers. On the graph of the pass they are followed from
    there; see `tfdp.rules.elsewhere`.

    Args:
        model: The model.
        rows: Length of the leading axis of the model's inputs.
        moves: How the units have moved the variables, if they have.
        is_of_one_unit: Whether the pass is of one unit alone. Then leading axes may be
            of anything, and variables may be used anywhere.
        places: Where rows lie otherwise than on the first axis, by calls and uses.
        follows_leaves: Whether the variables of layers whose rule is one of `Leaves` are
            followed to where they meet the rows, and the rule is left out.
        unrolls_loops: Whether loops that rules do not make are taken step by step.
        takes_loops_whole: Whether loops that are not taken step by step are taken whole;
            see `tfdp.rules.loops`.

    Attributes:
        tape: Has recorded the pass, from what is watched.
        elsewhere: Of one unit alone: trainable variables that no rule answers for, by
            their ids.
        watched: What was watched, in the order of the calls.
        repeats: Rows of the call that runs for each row of the batch.
        lengths: Checks that what was watched has the rows of the batch.
        moves: See above.
        hide: See `Call.hide`.
    """

    def __init__(
        self,
        model: keras.Model,
        rows: int | Tensor,
        moves: Moves | None = None,
        *,
        is_of_one_unit: bool = False,
        places: Places = MappingProxyType({}),
        follows_leaves: bool = False,
        unrolls_loops: bool | None = None,
        takes_loops_whole: bool = True,
    ) -> None:
        self.tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
        self.watched: list[Watched] = []
        self.repeats = 1
        self.lengths = Lengths(rows)
        self.moves = moves
        self._variables = VariableTapes(model, is_of_one_unit=is_of_one_unit)
        self.elsewhere = self._variables.elsewhere
        self.hide = self._variables.hide
        self._is_of_one_unit = is_of_one_unit
        self._model = model
        self._static_rows = rows if isinstance(rows, int) else None
        self._graph = tf.compat.v1.get_default_graph()
        # What calls with a rule have read, calls in them first: the variables' ids.
        self._read: list[int] = []
        # Whether a rule calls a layer now.
        self._is_by_rule = False
        # Whether a unit's own map runs now.
        self._is_in_map = False
        # Where in the graph the pass is, what rules make, and what they give up.
        self._first = self._made()
        self._by_rules: list[range] = []
        self._given_up: list[range] = []
        self._free = Free(self._static_rows)
        self._own_gradients = OwnGradients()
        self._places = NotedPlaces(places)
        self._losses: Tensor | None = None
        # What units move needs the rules.
        may_follow = moves is None and not is_of_one_unit
        self._follows_leaves = follows_leaves and may_follow
        self._unrolls_loops = unrolls_loops
        self._takes_loops_whole = takes_loops_whole and not unrolls_loops and may_follow
        self._loops = WholeLoops(model.trainable_variables, rows, self._free)
        # Whether a cell is called before its loop.
        self._tries_a_cell = False

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Record, and call the layers by their rules.

        Raises:
            UnsupportedLayerError: At the end, with all that could not be recorded:
                among it variables used outside of the calls of their own layer.
        """
        with contextlib.ExitStack() as entered:
            entered.enter_context(self._own_gradients.refused())
            entered.enter_context(self.tape)
            self.tape.watch([v.value for v in self._without_rule()])
            outside = entered.enter_context(self._variables.seeing())
            for path, layer in _keras.layers_by_path(self._model):
                add_loss = functools.partial(self._add_loss, path, layer.add_loss)
                entered.enter_context(
                    _keras.attributes_replaced(layer, add_loss=add_loss)
                )
                rule = find(layer) if layer.trainable_variables else None
                # The rules of all others take the leading axis for one of rows.
                if rule is None or (self._is_of_one_unit and is_leaf(layer)):
                    continue
                run = functools.partial(self._run, rule, path, layer, layer.call)
                call = functools.wraps(layer.call)(run)
                entered.enter_context(_keras.attributes_replaced(layer, call=call))
            begin = functools.partial(self._begin, self._model.call)
            call = functools.wraps(self._model.call)(begin)
            entered.enter_context(_keras.attributes_replaced(self._model, call=call))
            if self._is_of_one_unit:
                entered.enter_context(
                    _keras.maps_run_in(
                        functools.partial(
                            _keras.attributes_replaced, self, _is_in_map=True
                        )
                    )
                )
            else:
                # Keras's loops call `tf.while_loop` by this name.
                entered.enter_context(loops_run_by(self._run_loop))
            yield
        self._variables.note_foreign(outside)
        refusals = self._variables.refusals
        if self._loops.are_differentiated():
            refusals.append(str(OwnGradientsError("a loop")))
        self._watch_foreign()
        self._variables.refuse_out_of_reach()
        if refusals:
            raise UnsupportedLayerError(" ".join(dict.fromkeys(refusals)))

    def _begin(
        self, function: Callable[..., Nest], *args: Nest, **kwargs: Nest
    ) -> Nest:
        """Call the model; what it is given is rows."""
        self._free.add(_tensors((args, kwargs)))
        return function(*args, **kwargs)

    def _run(
        self,
        rule: Rule,
        path: str,
        layer: keras.layers.Layer,
        function: Callable[..., Nest],
        *args: Nest,
        **kwargs: Nest,
    ) -> Nest:
        if (
            self._loops.is_looking
            or (self._tries_a_cell and self._is_here())
            or (not self._is_by_rule and self._follows_leaves and is_leaf(layer))
        ):
            return function(*args, **kwargs)
        if (
            not self._is_by_rule
            and self._takes_loops_whole
            and loops_over_a_cell(layer)
        ):
            # Before the loop Keras calls the cell once, for the shape of what it returns.
            self._tries_a_cell = True
            try:
                return function(*args, **kwargs)
            finally:
                self._tries_a_cell = False
        name = getattr(rule, "__name__", str(rule))
        call = Call(layer, args, kwargs, path, self, name, function)
        first, before = self._made(), (len(self.watched), len(self.lengths.open))
        read_before = len(self._read)
        # The outer tape must not see what the rule uses: the rule answers for it.
        with self._variables.seeing() as used:
            try:
                self._check_is_within_reach(call)
                with self._variables.activations_seen(layer):
                    outputs = self._by_rule(call, rule)
                self._read += map(id, self._variables.of_model(used))
                self._variables.check_is_read(path, layer, self._read[read_before:])
                self._variables.refuse_foreign(used, own_variables(layer))
            except UnsupportedLayerError as error:
                del self.watched[before[0] :], self.lengths.open[before[1] :]
                self._given_up.append(range(first, self._made()))
                # The pass goes on, as if the layer had no rule.
                self.tape.watch([v.value for v in own_variables(layer)])
                outputs = function(*args, **kwargs)
                self._variables.note_foreign(
                    used, str(error), is_by_rule=self._is_by_rule
                )
                return outputs
        self._by_rules.append(range(first, self._made()))
        return outputs

    def _check_is_within_reach(self, call: Call) -> None:
        """Refuse a call that cannot be recorded, whatever its rule.

        Raises:
            UnsupportedLayerError: If it is in a graph of its own, or on no rows.
        """
        named_call = f"`{call.path}` ({type(call.layer).__name__})"
        if self._is_in_map:
            # Copies of what the call makes are not watched.
            raise UnsupportedLayerError(
                "Calls in a vectorized map have no rule where each unit is by "
                f"itself. Received: {named_call}."
            )
        if not self._is_here():
            note_loop()
            raise UnsupportedLayerError(
                "Only calls outside of branches can be recorded, and in loops of a "
                "fixed number of steps in which all is known, or of 64 steps at "
                f"most. Received: {named_call}, called in a graph of its own, where "
                f"this is not known: {self._loops.not_known}. Use "
                "`keras.ops.fori_loop(0, 8, body, x)` with a fixed number of steps, "
                "`unroll=True` in a recurrent layer, or register a rule for the "
                "layer that loops: `tfdp.rules.register(MyLayer, rule)`."
            )
        tensors = _tensors((call.args, call.kwargs))
        if not self._is_of_one_unit and all(map(self._free.holds, tensors)):
            # It is the same for all rows.
            raise UnsupportedLayerError(
                f"A layer must be called on rows. Received: {named_call}, called on "
                "none."
            )

    def _run_loop(self, *args: Nest, **kwargs: Nest) -> Nest:
        """Run a `tf.while_loop`, step by step if that is asked for, or whole."""
        if self._is_by_rule or not self._is_here() or self._loops.is_looking:
            return while_loop(*args, **kwargs)
        if self._unrolls_loops:
            return unrolled(*args, **kwargs)
        if self._takes_loops_whole:
            tapes = [self.tape, *self._variables.running]
            return self._loops.run(tapes, *args, **kwargs)
        return while_loop(*args, **kwargs)

    def _by_rule(self, call: Call, rule: Rule) -> Nest:
        """Call a layer by its rule, its rows brought into order where they are not."""
        place = None
        if not (self._is_by_rule or self._is_of_one_unit):
            place = self._places.next(call.path, _tensors((call.args, call.kwargs)))
        with _keras.attributes_replaced(self, _is_by_rule=True):
            return rule(call) if place is None else called_rows_first(call, rule, place)

    def _made(self) -> int:
        """Count the operations in the graph of the pass."""
        return len(self._graph.get_operations())

    def _is_here(self) -> bool:
        """Tell whether operations are made in the graph of the pass, not in one inside."""
        return tf.compat.v1.get_default_graph() is self._graph

    def _add_loss(
        self, path: str, add_loss: Callable[[Nest], None], loss: Nest
    ) -> None:
        """Let a layer add a loss, unless its rule would not see what it comes from."""
        if self._is_by_rule:
            raise UnsupportedLayerError(
                "A rule only sees what a layer returns. Received: "
                f"`{path}`, which calls `add_loss` inside."
            )
        add_loss(loss)

    def _without_rule(self) -> list[Variable]:
        """List the trainable variables that the tape must see where they are read."""
        if self._is_of_one_unit:
            return list(self._model.trainable_variables)
        with_rule = {
            id(variable)
            for layer in _keras.flatten_layers(self._model)
            if layer.trainable_variables and find(layer) is not None
            if not (self._follows_leaves and is_leaf(layer))
            for variable in own_variables(layer)
        }
        # And those that an earlier trace found used elsewhere than in a call of their layer.
        return [
            v
            for v in self._model.trainable_variables
            if id(v) not in with_rule or v.path in self._places.paths
        ]

    def _watch_foreign(self) -> None:
        """Watch what variables meet the rows in that rules do not answer for."""
        foreign, refusals = self._variables.foreign.values(), self._variables.refusals
        if self.moves is not None:
            refusals += [reason for _, reason in foreign]
            return
        if self._is_of_one_unit:
            return
        rows = self._static_rows
        trace = tracing()
        operations = Pass(self._first, self._free, self._by_rules, self._given_up)
        for variable in self._model.trainable_variables:
            leak = operations.leak_of(variable)
            if leak is not None:
                refusals.append(
                    f"{used_elsewhere(variable)} Its layer makes something of it that "
                    f"{named(leak)} uses."
                )
        met_rows: list[Followed] = []
        # What several variables have made together is used once.
        uses: dict[tuple[str, int], tuple[Use, Place | None, list[Followed]]] = {}
        unknown: dict[str, list[Variable]] = {}
        for variable, _ in foreign:
            with self._following([variable], unknown):
                if trace is not None and trace.reads_alone(variable):
                    raise NotFollowedError("a loss of each example alone")
                followed = operations.follow(variable)
                followed.uses[:] = [
                    use
                    for use in followed.uses
                    if self._loops.tap_of(use) or operations.matters(use, self._losses)
                ]
                for use in followed.uses:
                    place = self._place_of_use(variable, use)
                    one = uses.setdefault((use.op.name, use.place), (use, place, []))
                    one[2].append(followed)
                met_rows.append(followed)
        # Once all is noted, for those who look where rows lie.
        for use, place, together in uses.values():
            variables = [followed.variable for followed in together]
            with self._following(variables, unknown):
                found = met(
                    together, use, rows, place, is_recorded=self._is_recorded(use)
                )
                self._watch_use(variables[0].path, use, found)
        reasons = {id(variable): reason for variable, reason in foreign}
        for what, variables in unknown.items():
            refusals += dict.fromkeys(reasons[id(variable)] for variable in variables)
            paths = ", ".join(dict.fromkeys(f"`{each.path}`" for each in variables))
            refusals.append(f"Nothing is known of {what}; in it are {paths}.")
        refusals += self._loops.unanswered(met_rows)

    @contextlib.contextmanager
    def _following(
        self, variables: list[Variable], unknown: dict[str, list[Variable]]
    ) -> Iterator[None]:
        """Note variables that are in something of which nothing is known."""
        try:
            yield
        except NotFollowedError as error:
            if error.is_in_function:
                note_loop()
            unknown.setdefault(str(error), []).extend(variables)

    def _is_recorded(self, use: Use) -> bool:
        return self._loops.tap_of(use) is not None or has_recorded(
            self.tape, use.output
        )

    def _place_of_use(self, variable: Variable, use: Use) -> Place | None:
        tap = self._loops.tap_of(use)
        if tap is not None:
            return tap.place
        return self._places.next(
            variable.path, [use.output], is_recorded=self._is_recorded(use)
        )

    def _watch_use(self, path: str, use: Use, found: Met) -> None:
        rule = use.op.type
        tensor, terms, place = use.output, found.terms, found.place
        tap = self._loops.tap_of(use)
        if tap is None:
            self.lengths.check(path, found.rows, place.of_row, place.axis)
        else:
            # What the use makes outside of the loop, nobody needs.
            tensor, terms = tap.zeros, lambda g: found.terms(tap.gradients(g))
            self.lengths.check(path, tap.rows, tap.steps)
        watched = Watched(
            path, rule, [tensor], terms, place.of_row, must_be_reached=True
        )
        self.watched.append(watched)

    def note_losses(self, losses: Tensor) -> None:
        """Note where all gradients come from, at the end of what is observed."""
        self._losses = losses

    def watch(
        self,
        path: str,
        rule: str,
        tensors: list[Tensor],
        terms: Terms,
        linear_terms: Terms | None,
    ) -> list[Tensor]:
        """Watch tensors of a call; see `Call.watch_all`."""
        # The leading axis of a call in one unit may be of anything.
        repeats = None if self._is_of_one_unit else self.repeats
        watched = Watched(path, rule, [], terms, repeats)
        shifts: list[Tensor | None] = [None] * len(tensors)
        if self.moves is not None:
            if linear_terms is None:
                raise UnsupportedLayerError(
                    "Units can only have weights of their own in layers that are "
                    f"linear in them. Received: `{path}` (rule `{rule}`)."
                )
            linear = watched._replace(terms=linear_terms)
            shifts = self.moves.shifts(tensors, linear.terms_of)
        for tensor, shift in zip(tensors, shifts, strict=True):
            # The tape knows tensors by identity: another call may have this one too.
            own = _keras.identity_with_gradient(
                tensor, functools.partial(self._own_gradients.see, path)
            )
            if self.moves is not None and shift is not None:
                own = self.moves.moved(own, shift)
            if not self._is_of_one_unit:
                self.lengths.check(path, own, self.repeats)
            self.tape.watch(own)
            # Some layers attach a mask in their own code.
            watched.tensors.append(_keras.with_mask_of(own, tensor))
        self.watched.append(watched)
        return watched.tensors


def _tensors(nest: Nest) -> list[Tensor]:
    return [leaf for leaf in keras.tree.flatten(nest) if tf.is_tensor(leaf)]
