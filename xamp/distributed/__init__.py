"""Processes that share a model: where each parameter lives, who decides on a step, and the words of DDP and FSDP.

Modules: processes that share a model. ``ranks`` says where a parameter lives, this rank's part of it and the groups
that have the rest; ``ddp`` notices DistributedDataParallel, ``fsdp`` tells FSDP in which dtype to gather and finds
what it hides; ``wrappers`` knows those of a session and lets ranks agree, ``rank_settings`` compares settings through
the store of the group.

``ranks.layout_of`` answers once for each parameter which process groups hold it and which divide its elements: from
the parameter where it is a DTensor, from its module under FSDP1, which also keeps how its parameters were divided as
DTensors before. All else follows from these two lists, and knows no wrapper by name but DDP, which leaves no trace in
a parameter.

- Who decides. The group that ``initialize`` was given, and the groups that divide a parameter between them, because
  no rank may step its part alone; else the groups that hold the optimizer's parameters (a mesh has one for each
  dimension, and MAX over one after the other is MAX over all); else the default group. Each rank unscales its local
  part of a DTensor, so that torch does not ask the ranks of the mesh once more. So ranks outside of the wrappers are
  not waited for. The decision is in the gradients already, and nothing is shared, where each parameter is in a DDP
  over exactly these ranks without a comm hook, or with a hook of torch's that averages. Of any other hook (``noop``,
  ``post_localSGD``, PowerSGD, the user's) nobody knows that.
- Same settings. At the first ``scale_loss`` each rank writes its policy and loss scales into the store of these
  groups, under a name made from the names of the model's parameters, and reads those of the others. It waits for them
  only where a wrapper or ``process_group=`` says that they come. So idle ranks hold nobody up, nor do stages of a
  pipeline, which may have other sessions besides. A session that is switched off writes, and waits for nobody.
  Sessions of several levels in one group do not meet: the first under a name meets the first on the other ranks, and
  so on.
- A backward that raised. The collective calls of that rank no longer meet those of the others, and DDP does not
  notice. Its next step is refused; where reduction was postponed (``no_sync``), nothing was missed and nothing is
  refused, but by FSDP, whose next backward would not be whole.
- Norms. Each rank takes the norm of its own part, norms are gathered over the groups that divide the parameter, and
  their norm is that of the whole. The calls follow the parameters: a rank of FSDP1 may have no gradient of a
  parameter. A logger runs on one rank, so ``metrics()`` has the norm of sharded gradients only if ``clip_grad_norm_``
  has computed it.
- Scalers by hand. A ``GradScaler`` knows no model, so its first check searches all objects for DDPs that hold the
  optimizer's parameters, and compares its settings with those of their ranks. Where nothing is shared, nothing is
  compared.
- ``Join``. At its end torch gives every rank the weights of the last one, but neither its scale nor its masters. So a
  level that has either is refused at the first ``scale_loss`` under ``Join``.
- Comm hooks with a memory. PowerSGD keeps parts of each gradient for the next backward (``use_error_feedback``,
  ``warm_start``). After one overflow these are inf or nan for good. ``ddp.warn_of_memory`` says so at the first
  ``scale_loss`` that meets the DDP.

At O2 and O5 there is one fp32 copy of each element on the rank that owns it, the master, and the optimizer steps it.
What computes in 16 bits depends on who shards:

- FSDP1, FSDP2, HSDP: the fp32 shard itself, which stays the model's parameter and the optimizer's: what FSDP gathers:
  it casts the shard first, so half the bytes move. Gradients are reduced in fp32 and reach the shard in fp32
- tensor parallelism (DTensor without FSDP): an fp32 DTensor of the same mesh and placements, made from the local
  part: the model's parameter, cast in place: shell, local tensor and spec
- ZeRO: an fp32 copy of the whole parameter on every rank; a rank has moments of its share only: the model's
  parameter, cast in place

- FSDP. ``lowering.ModelCasts`` asks ``fsdp.units_of`` what FSDP gathers in one piece, before anything changes. A unit
  computes in one dtype, so one with a batch norm among other parameters is refused. ``Unit.compute_in`` sets torch's
  policy of the unit, also after forwards have run, and returns what sets it back. That is what ``xamp.fsdp_policy``
  asks of torch beforehand. Inputs and outputs of the root are the region's to cast; units inside cast no output, or
  each border would go to fp32 and back. Nothing is copied back after a step, and ``state_dict``, DCP and
  ``get_state_dict`` see fp32 shards under the model's names.
- DTensors. Gradients may be placed differently from their parameter, so ``moves.transfer`` first places them like it
  (a collective call that all ranks of the mesh make). All copies are of local parts in one ``_foreach`` call,
  whatever their meshes. The hooks put the masters into ``model.state_dict()``, where DCP finds them;
  ``xamp.state_dict()`` holds whole tensors only and leaves them out.
- ZeRO. ``optimizer.replace_params`` puts the masters into the inner optimizer too and lets ZeRO divide them again.
  ZeRO broadcasts masters after a step, and ``copy_back`` writes them into the model.
- Sharded too late. ``fully_shard`` and ``parallelize_module`` replace parameters. ``Wrappers.remember_params``
  remembers which of an optimizer's parameters were the models' at ``initialize``. The first ``scale_loss`` looks for
  them, and so does a step that finds fewer gradients than the one before; what is gone is an error. FSDP1 keeps the
  parameters it is given, so it may come later at O1 and O4.
- ``get_state_dict`` looks up the model's parameters in ``param_groups``. ``sharding`` hands it a view of the
  optimizer in which each master's place is taken by its parameter.
"""
