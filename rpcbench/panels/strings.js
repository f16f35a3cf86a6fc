// The words of the panels, in one place: what a user reads is here, and the drawing code only places it.
// Rules: short whole sentences in plain English, and the words of the glossary: ready, busy, stopped, hidden, in flight,
// errors, cancelled, waiting, step time, bubble. `help` is the paragraph behind a panel's "?" button.

const STRINGS = {
  common: {
    ofCluster: (name) => `of ${name}`,
    clearSearch: "Only what has this text is shown. Show all again",
    ofClusterTip: (name) => `This panel is of the cluster ${name}.`,
    // By kind of state: the text of the chip in a panel's head, and its tooltip.
    states: {
      live: ["Live", "It follows the cluster. Click to pause the picture."],
      late: ["Picture of", "The kernel has not said for a while that this picture is the present one. The panel asks again by itself."],
      paused: ["Paused", "The picture stands still. Click to follow the cluster again."],
      stopped: ["Stopped", "It has ended. This is the last picture before that."],
      record: ["Record", "This plays a record, or shows one that has ended."],
      simulated: ["Simulated", "It shows a simulation: none of it has run."],
      restarted: ["Kernel restarted", "This is the last picture of the former kernel. Run the cell again for a live one."],
      gone: ["No kernel", "This is the last picture of a kernel that has ended. Run the cell again for a live one."],
      cut: ["No connection", "The page does not reach the kernel now. This is the last picture that came."],
      failed: ["Stopped", "An error has ended the updates. This is the last picture before that."],
    },
    // Instead of advice, where a panel that is not live has nothing to draw.
    nothing: { stopped: "Nothing was here at the end.", record: "Nothing is here at this moment of the record.", simulated: "" },
    // States of members, where they differ from those of the view.
    members: { left: "stopped", suspect: "no answer", stopped: "suspended" },
    help: "What does this panel show?",
    menu: (title) => `${title}: figures, controls and help`,
    camera: "Leave a snapshot in the notebook",
    kept: "A snapshot stands below the output of the cell.",
  },
  workers: {
    help: [
      "A row for each process: the notebook and its workers. The curves are those of the last minute, with one scale for all rows.",
      ...LISTS.workers.map(({ help }) => help),
    ].join(" "),
    hint: ["No cluster runs. Start one: ", "%cluster start 2"],
    acting: { restart: "starts again …", interrupt: "is interrupted …", stop: "stops …" },
    process: (pid, start) => [
      pid === null ? "" : `process ${pid}`,
      start ? `started ${start === 1 ? "twice" : `${start + 1} times`}` : "",
    ],
    threads: (busy, waiting) => `${busy} busy, ${waiting} waiting`,
    unknown: "not known",
    bytes: (sent, received) => `↑ ${sent} ↓ ${received}`,
    bytesTip: (sent, received) => `${sent} bytes sent, ${received} received`,
    link: (name, sent, received) => `${name}: ${sent} sent, ${received} received`,
    minute: (most) => `in the last minute at most ${most}`,
    noLog: "It wrote nothing outside cells.",
    log: "End of its output",
    stacks: "Where it is",
    legend: {
      curve: (name, top, remark) => `${name} in the last minute, 0 to ${top}${remark && `; ${remark}`}`,
      full: "a thread that runs a function",
      hollow: "a thread that waits",
    },
    folded: (names) => `No room for ${names}: a click on a worker's name shows all.`,
    and: "and",
    menu: (name) => `What to do with ${name}`,
    loss: "everything it holds is lost",
    sure: "sure?",
    again: (name, warning) => `${name}: ${warning}. Press again to do it.`,
    buttons: {
      stack: ["stack", "Where is it? Show the lines that its threads run now"],
      interrupt: ["interrupt", "Stop the cell that runs there"],
      restart: ["restart", "End it and start it again: everything it holds is lost"],
      fewer: ["− worker", "End the last worker"],
      more: ["+ worker", "Start one more"],
    },
    stats: { ready: "ready", lost: "lost", suspended: "suspended", queued: "queued", cell: "cell" },
    summary: (ready, all) => `${ready} of ${all} workers ready`,
  },
  progress: {
    help:
      "A row for each cluster.map and each fit of a pipeline, the latest first. In its bar what is done is full, what has failed is " +
      "red, and what runs is pale blue; the rest waits. The rate is that of the last items, the mean of a " +
      "job that has ended, and the time left is what the rest takes at this rate. A click on a name shows the cell that began the job. Jobs that have ended stay while the " +
      "cluster runs, the last 50. Below stands a row for each cell that ran on a worker, or here: where, with the number of its " +
      "prompt there, how long it ran, and how it ended. A click shows the cell. A cell waits where an earlier one has not ended. " +
      "“copy” copies the code; “run again”, in JupyterLab, runs the notebook's cell if it still has this code.",
    hint: ["Nothing has run since the workers started. Try: ", "list(cluster.map(abs, range(9)))"],
    heads: { job: "job", progress: "progress", time: "time", state: "state" },
    cellHeads: { cell: "cell", where: "on", time: "time", state: "state", acts: "buttons" },
    jobs: "Jobs",
    cells: "Cells",
    worker: "Cells on",
    all: "all workers",
    stats: {
      jobs: (count) => (count === 1 ? "job running" : "jobs running"),
      cells: (count) => (count === 1 ? "cell running" : "cells running"),
      failed: (count) => (count === 1 ? "job failed" : "jobs failed"),
    },
    cellPlace: (number, time) => [number === null ? "" : `[${number}]`, time].filter(Boolean).join(" at "),
    waited: (time) => `waited ${time}`,
    unbegun: (time) => `never began, waited ${time}`,
    copy: ["copy", "Copy the code"],
    again: ["run again", "Run this cell of the notebook again"],
    copied: "The code is copied.",
    notCopied: "The page may not copy.",
    changed: "The cell has changed, or is gone: run it in the notebook.",
    place: (kind, number) => (number === null ? kind : `${kind} in [${number}]`),
    counts: (done, total, unit) => `${done}${total === null ? "" : ` of ${total}`} ${unit}${(total ?? done) === "1" ? "" : "s"} done`,
    running: (count) => `${count} running`,
    failed: (count) => `${count} failed`,
    waiting: (count) => `${count} waiting`,
    cancelled: (count) => `${count} cancelled`,
    unbegunItems: (count) => `${count} not begun`,
    rate: (text, unit) => `${text} ${unit}s/s`,
    left: (time) => `about ${time} left`,
    heldBack: "until its results are taken",
    gone: (number) => `Cell [${number}] is no longer there, or has run again since.`,
    noCell: "It was begun outside cells.",
    reveal: "Show the cell that began it",
    more: (count, noun) => `${count} more ${noun}${count === 1 ? "" : "s"}`,
    fewer: (noun) => `fewer ${noun}s`,
    legend: { done: "done", failed: "failed", running: "running", waiting: "waiting" },
    describe: (jobs, cells) => `${jobs} and ${cells} running.`,
    untold: "not known to have ended",
    unknown: (count) => `${count} not known to be done`,
  },
  rrefs: {
    help:
      "An RRef is a reference to a value that lives on one worker, its owner. Each row is an RRef: the square stands " +
      "in the column of its owner, and a circle in that of each user, a member that holds the reference. A line joins " +
      "the users that the owner knows of; a dashed circle waits for the owner's answer, and a dashed arrow is a " +
      "message on its way. When the last user lets go, the owner frees the value. The colour is that of the type. " +
      "Below the name stand the bytes of its tensors when it was made, its age, and the cell that made it. With more " +
      "than 8 workers or 50 RRefs, those of one type share a row, which a click unfolds; its marks count the RRefs " +
      "that each member owns and uses. To find a leak, look for what is old or big.",
    hint: ["No RRef yet. Make one: ", 'rref = cluster.remote("worker1", list, ("abc",))'],
    unknown: "type unknown",
    user: "user",
    noCell: "made outside cells",
    owns: "owns",
    uses: "uses",
    inTensors: "in tensors",
    head: { short: (owned, used) => `■ ${owned}  ● ${used}`, long: (owned, used) => `owns ${owned} RRefs, uses ${used}` },
    legend: { owner: "owner", user: "user", pending: "waits for the owner", deleting: "lets go" },
    forks: {
      confirmed: "confirmed by the owner",
      pending: "waits for the owner's confirmation",
      deleting: "being deleted",
      listed: "known to the owner only",
      short: { pending: "waiting", deleting: "letting go" },
    },
    shown: (count, all) => `${count} of ${all} shown`,
    gone: (number) => `Cell [${number}] is no longer there, or has run again since.`,
    describe: (rrefs, members, pending) => `${rrefs} on ${members}, ${pending} users waiting for the owner.`,
    controls: {
      worker: "worker", type: "type", state: "state", any: "any",
      order: "order", orders: { creation: "by creation", newest: "newest first", size: "biggest first" },
      group: "group", groups: { auto: "if many", type: "by type", cell: "by cell", off: "off" },
      find: "find", findTip: "Find an RRef by its text",
    },
  },
  autograd: {
    title: "Autograd contexts",
    help:
      "A context records the messages that a forward pass sends between workers, so that backward can follow them back. Each " +
      "row is a worker. A block holds the operations of its part of the graph that lead to the same messages, in the order of " +
      "the forward; they run together in backward, as one region. A blue arrow is a message, from its sender to its receiver: a " +
      "block stands to the right of all that it needs. In backward an orange arrow beside it is its gradient, which goes back to " +
      "the sender, and a block that has run is filled, with its time. On the right stand the gradients that each worker holds: " +
      "in the context, not in .grad. The operations of the loss are known when backward begins. Operations that only reshape " +
      "are left out. Large graphs fold. While contexts come and go, as in training, the last one that has ended is shown. A " +
      "pipeline's step has the number that the pipeline panel gives it.",
    hint: ["Autograd contexts appear here from now on. Open one: ", "with rpcbench.autograd.context() as context_id:"],
    shown: "Context shown",
    latest: "latest",
    named: (key, step, isEnded) => `${step === null ? `context ${key}` : `step ${step}`}${isEnded ? ", released" : ""}`,
    context: "context",
    step: (number) => `step ${number}`,
    state: (isEnded) => (isEnded ? "released" : "open"),
    stats: {
      received: "received", told: "received, by what is known", flight: "in flight", back: "gradients back", held: "held", heldLast: "held until the release",
      time: "backward", others: (count) => (count === 1 ? "context open" : "contexts open"),
    },
    axis: (isBackward, isHeld, isNarrow) => [
      ["forward", "forward →", "rb-axis-forward"],
      ...(isBackward ? [["back", "← gradients", "rb-axis-back"]] : []),
      ...(isHeld ? [["held", isNarrow ? "held" : "gradients held", "rb-note"]] : []),
    ],
    left: (count) => `${count} to come`,
    discovering: "asks for its sends",
    held: (count) => plural(count, "gradient"),
    more: (count) => `… and ${count} more`,
    stage: (number) => `stage ${number}`,
    operations: (count) => (count === null ? "over 1000 ops" : `${count} ${count === 1 ? "op" : "ops"}`),
    passedOn: "=",
    runs: "runs",
    failed: "failed",
    backwards: (done, times, time) => `${done} of ${times} back${time && `, ${time}`}`,
    legend: {
      block: "operations of a worker, in order",
      count: "a worker's operations, their number",
      passedOn: "sent on as it was received",
      leaf: "a leaf that is sent",
      end: "received, not used yet",
      runs: "runs now",
      ran: "has run backward, with its time",
      failed: "failed",
      forward: "message (send → recv)",
      flight: "message in flight",
      lost: "never received",
      back: "its gradient came back",
      backFlight: "gradient in flight",
      held: "gradient held in the context",
    },
    end: (name) => `${name}: an end of a message with no operations known. Those of the loss appear when backward begins.`,
    lane: ({ name, id }, member, passes) =>
      [
        `${name} (id ${id}): ${member ? `${plural(member.sends, "send")}, ${plural(member.recvs, "recv")}` : "no report of this context"}`,
        ...passes.map((part) =>
          `backward ${part.pass}, ${part.state}: ${part.arrived} of ${part.needed} gradients arrived` +
          (part.regions === null ? "" : `, ${part.ran} of ${plural(part.regions, "region")} run`)),
      ].join("\n"),
    // A block: its operations with their modules, or those of a stage, and how far backward is.
    block: ({ worker, parts }, { state, text }, names) => {
      const [{ ops, count, stage }] = parts;
      const lists = [...new Set(parts.map((part) => part.ops.slice(0, 3).map((op) => op.split(" ")[0]).join(", ")))].filter(Boolean);
      const named = ops.map((op) => (op.startsWith("leaf") ? op : op.replace(/ (.+)$/, " ($1)")));
      const more = count > ops.length ? [`${count - ops.length} more`] : [];
      const special = { 0: "passes on what it received", null: "over 1000 operations" };
      const what = special[count] ?? [...named, ...more].join(", ");
      const where = stage === null ? names(worker) : `${names(worker)}, stage ${stage}`;
      const done = { ran: "has run", partly: "has run in part", runs: "runs now", failed: "failed here" }[state];
      const all = parts.length > 1 ? `${parts.length} parts, ${lists.slice(0, 3).join(" and ")}` : what;
      return `${where}: ${all}.${done ? ` Backward ${done}: ${text}.` : ""}`;
    },
    message: ({ from, to, messages }, { sent, received, isUntold, fired, back }, isEnded, names) => {
      const [{ label = "", shape = "" }] = messages;
      const bytes = messages.reduce((total, one) => total + (one.bytes ?? 0), 0);
      const what = sent === 1 && label ? label : `${plural(sent, "message")}${label && `, the first of ${label}`}`;
      const about = [what, shape, bytes ? formatBytes(bytes) : ""].filter(Boolean).join(", ");
      const all = (count, done, rest) => (count === sent ? done : `${count} of ${sent} ${done}${rest}`);
      const gradients = sent === 1 ? "gradient came back" : "gradients came back";
      const came = isUntold ? `${names(to.worker)} is gone and does not tell whether it has received` :
        all(received, "received", isEnded ? "" : ", the others in flight");
      const none = isEnded ? "no gradient" : "no gradient yet";
      const gradient = fired ? all(back, gradients, back < fired ? ", the others in flight" : "") : none;
      const ends = `${names(from.worker)} → ${names(to.worker)}`;
      return `${ends}: ${about}; ${came}; ${sent === 1 && back < fired ? "gradient in flight" : gradient}.`;
    },
    describe: (all, { context, sends, recvs, gradients, step }, isEnded, back, { members }) =>
      `${all}. ${step === null ? "" : `Step ${step}, `}context ${context}, ${isEnded ? "released" : "open"}, on ` +
      `${plural(members.length, "worker")}: ${recvs} of ${sends} messages received, ${back} gradients back, ${gradients} held.`,
    rest: (isEnded, isBackward, isKnown, step) =>
      !isKnown ? "Its operations are not known: no panel was open when it began, or its workers did not report them."
      : isBackward || isEnded || step !== null ? "Point at a block or an arrow, or use the arrow keys, for details."
      : "Point at a block or an arrow for details. The operations of the loss appear when backward begins.",
  },
  pipeline: {
    help:
      "The panel shows the last finished training step: a row for each worker, a block for each operation of a stage on " +
      "a micro-batch, with forwards at the top of a row and backwards at its bottom. A dotted line is time in which the " +
      "worker waits; the bubble is the share of all workers' time that is spent so. Its minimum is the share that the " +
      "schedule cannot avoid, and the rest is divided by its causes. On the right of a row stands how busy the worker " +
      "was, and how much longer than the minimum it waited, for the main cause. The pale strip below a row is the ideal: " +
      "the same order with equally fast stages and transfers that take no time; a dashed line is its end. A click on a " +
      "block lights its micro-batch in all stages. Ctrl and the wheel, or + and −, zoom; arrow keys and dragging move; 0 " +
      "fits. A click on a curve opens that step. Steps are numbered through all pipelines of the notebook, evaluations too; a " +
      "fit counts its own, and the panel of progress has both. With torch.distributed.pipelining each process group counts its own.",
    numberTip:
      "The number among the steps of all pipelines of this notebook, evaluations too; with torch.distributed.pipelining among those " +
      "of its process group. A fit counts its own steps.",
    hint: ["No pipeline step yet. Run one: ", "Pipeline(stages, microbatches=8, loss_fn=…).step(x, y)"],
    kinds: { ...LISTS.pipeline.kinds, other: "other" },
    legend: {
      coloured: "a colour for each micro-batch",
      waits: "waits",
      memory: "activations held",
      ideal: "ideal: equal stages, free transfers",
      idealEnd: "end of the ideal",
      lit: "to the operation that uses its result",
      now: "now",
      before: "still to come, as in the step before",
    },
    minimum: "minimum",
    heads: { busy: "busy", waits: "waits for" },
    controls: {
      bar: "Pipeline controls",
      slider: "Step shown",
      latest: "Latest",
      latestTip: "Show the last finished training step",
      live: "Live cursor",
      liveTip: "Follow the step that runs",
      colour: "Colour",
      colours: { kind: "by kind", microbatch: "by micro-batch" },
      microbatch: "Micro-batch",
      none: "all",
      ideal: "Ideal",
      idealTip: "Show the ideal schedule below each row",
      out: "Zoom out (−)",
      in: "Zoom in (+)",
      fit: "Fit",
      fitTip: "Show the whole step (0)",
      trace: "Perfetto",
      traceTip: "Save the steps that this panel has as a trace for ui.perfetto.dev",
      svg: "SVG",
      svgTip: "Save the picture as SVG",
    },
    curves: { loss: "loss", time: "step time", bubble: "bubble", rate: "samples/s" },
    idealTime: (time) => ` (ideal ${time})`,
    state: { complete: "step time", running: "so far", failed: "until it failed", interrupted: "until it was interrupted" },
    evaluation: "evaluation",
    noOperation: "no operation reported",
    finished: "finished",
    peak: (name) => `activations at most, on ${name}`,
    runs: (step) => `step ${step} runs`,
    causes: {
      transfer: (points) => `${points} transfer`,
      overhead: (points) => `${points} overhead between operations`,
      other: (points) => `${points} other`,
      worker: (points, name) => `${points} waiting for ${name}`,
    },
    unmeasured: {
      running: "The step runs. Its bubble is known when it has ended.",
      failed: "The step has failed: it has no bubble.",
      interrupted: "The step was interrupted: it has no bubble.",
    },
    bubble: (all, minimum) => `Bubble ${all} %${minimum === null ? "" : `, minimum ${minimum} %`}`,
    points: (count) => (count === 1 ? "point" : "points"),
    least: "as small as the schedule allows",
    microbatch: (number, ops, time, waited) =>
      `Micro-batch ${number}: ${ops} in ${time}, of which it waited ${waited} between operations.`,
  },
  messages: {
    help:
      "A line for each member, from top to bottom in the order of time, and an arrow for each message: level if it " +
      "arrived before anything else happened, else it slopes down to the row of its arrival. Times are counted from the first " +
      "message that was reported, and the head says when that was. A dashed arrow is in " +
      "flight. A collective is a row of dots, one for each member that has come; the red one with an edge came last. " +
      "Messages by which members hold together or panels are fed are left out. A click, or the arrow keys, choose a " +
      "message and show its details; the buttons below then show only its call, its RRefs, or its context. The list " +
      "stands still while the pointer or the focus is on it, or a message is chosen, and says what is new. All words " +
      "in the search field must match a message: a part of its text or of a member's name, or call:0.17, rref:0.4, " +
      "from:worker1, to:worker1, at:worker1. Members report messages only while this panel is open, and 30 s longer: a page that is loaded again has them still.",
    hint: ["Messages appear here from now on. Send some: ", 'cluster.rpc_sync("worker1", max, (1, 2))'],
    allHidden: (count) =>
      `${count === 1 ? "The only message is" : `All ${count} messages are`} hidden: clear the search, or choose “all kinds”.`,
    pictureTip: "Messages, picture: arrow keys choose a message",
    find: "call train  at:worker1  rref:0.4",
    findTip: "Show only messages that match all words: a part of the text, at:worker1, from:, to:, call:0.17, rref:0.4, context:",
    groupTip: "Kinds of messages",
    only: "Show only messages that match this, or all again",
    choices: { "": "all but notices", all: "all kinds" },
    cameLast: "came last",
    missing: "missing",
    states: { ...LISTS.messages.states, open: "open", failed: "failed", done: "", received: "" },
    outcomes: {
      ...LISTS.messages.states,
      received: "received",
      untold: "its receiver did not report whether it arrived",
    },
    zero: "after",
    zeroOfFirst: ["after", "the first"],
    zeroTip: "Times are counted from the first message or collective that was reported here. They stay when it is dropped.",
    tries: (count) => `${count} tries`,
    kind: (name) => `kind ${name}`,
    sentTimes: (count) => `sent ${count} times`,
    bytes: (size) => `${size} of data`,
    at: (time) => `at ${time}`,
    later: (time) => `received ${time} later`,
    last: (kept, all) => `last ${kept} of ${all}`,
    news: (added, changed) => [added && `${added} new`, changed && `${changed} changed`].filter(Boolean).join(", "),
    newsTip: "The list stands still while you are on it, or a row is chosen. Click to see what has come",
    close: "Close, and go on with the list (Escape)",
    stats: {
      message: "message", messages: "messages", collective: "collective", collectives: "collectives of these groups", hidden: "hidden", underWay: "in flight", lost: "lost", open: "open",
      skew: "between hosts",
    },
    describe: (messages, underWay, lost, collectives) =>
      `${messages}, ${underWay} in flight, ${lost} lost${collectives ? `, ${collectives}` : ""}.`,
  },
  shards: {
    title: "Sharding",
    help:
      "Each row is a parameter of a model, each column a rank. The box stands for the whole parameter, its first dimension " +
      "from top to bottom, the next one from left to right; a narrow box is a vector. The filled part is what the rank holds: " +
      "blue is a piece, or a copy that is kept equal on several ranks, grey a copy that nothing keeps equal. While " +
      "fully_shard has the parameter gathered for a forward or a backward pass, the part that it adds lights up in amber; it " +
      "flashes where that was over before this picture. The bar beside a box, and the one at the head of a column, is memory: " +
      "the parameter, its gradient, and the state of the optimizer; at the head its full width is the model without any " +
      "sharding, in one process. The grid above is the DeviceMesh: the ranks, and the names of its dimensions. A model is " +
      "watched from %panel shards NAME on, or from rpcbench.watch_model(model) in a cell of the workers, after it was sharded.",
    hint: ["No model is watched. Run %panel shards model, or in a cell of the workers, after the model was sharded: ", "rpcbench.watch_model(model)"],
    none: "No model is watched.",
    corner: "parameter",
    shown: "Model shown",
    find: "find",
    findTip: "Show only parameters whose names have this text",
    mesh: (dims) => `DeviceMesh ${dims}`,
    seat: (rank, name) => `rank ${rank}, ${name}`,
    rank: (rank) => `rank ${rank}`,
    stage: (number) => `stage ${number}`,
    share: (own, percent, all) => `${own}, ${percent} of ${all}`,
    scalar: "scalar",
    whole: (times) => `whole now; gathered ${times} times since it is watched`,
    gathered: (times) => `gathered ${times === 1 ? "once" : `${times} times`} since it is watched`,
    most: (now, most) => `gathered now: ${now}; at most at once: ${most}`,
    device: (name) => `on the device ${name}`,
    nothing: "no memory",
    missing: (name) => `${name} does not have this parameter.`,
    also: (names) => `also ${names}`,
    more: (count) => `${count} more parameters are not drawn: find them by their names.`,
    stats: {
      parameter: "parameter", unsharded: "unsharded", step: "optimizer step", gathered: (most) => `gathered (at most ${most})`,
    },
    lit: "gathered now",
    describe: (model, params, ranks, shares) => `${model}: ${params} on ${ranks}; they hold ${shares} of the unsharded model.`,
  },
  compare: {
    title: "Comparison",
    help:
      "The last comparison of a parallel program with one process. Each row is a module, a parameter or a buffer, nested by " +
      "their names; each column a phase of a training step: initial values, outputs of modules, the loss, gradients of outputs, " +
      "gradients of parameters, and what the optimizer made of them. A square is a value, and its sign is the verdict; the one " +
      "with a black ring differs first. Those that are wrong after it have an outline, as they may only follow from it. The boxes beside a name are the ranks of the mesh: " +
      "each is filled where that rank has the tensor, and dashed if it has none of it; none fits: no way of sharing explains the values. A click on a square, or the arrow keys, show its error on each rank: the line " +
      "across a bar is what round-off explains. Of the value that differs first a map shows where: a cell is a number, or a block " +
      "of numbers, as red as the largest difference in it. Modules of a large model are folded where all is right.",
    hint: ["Nothing was compared yet. Compare two programs: ", "cluster.compare(reference=(make_model, step), parallel=(make_parallel, step))"],
    none: "Nothing was compared.",
    corner: "value",
    shared: "shared as",
    some: (begin, end, all) => `value (rows ${begin} to ${end} of ${all})`,
    shown: "Step shown",
    stepWords: (number, hasFirst, word) => `step ${number}: ${hasFirst ? "has the first difference" : word || "no values"}`,
    model: "(model)",
    value: "value",
    call: (number) => `call ${number}`,
    scalar: "scalar",
    norm: (number) => `norm ${number}`,
    error: (error, allowed) => `error ${error}, allowed ${allowed}`,
    infinite: "infinite",
    layout: (words) => `shared as ${words}`,
    nearest: (words) => (words ? `no way of sharing fits; the nearest is ${words}` : "no way of sharing fits the shapes"),
    near: (words) => `nearest: ${words}`,
    fitsNone: "none fits",
    times: (times) => ` (${times} times as much)`,
    on: (ranks) => ` on ${ranks}`,
    onAll: (count) => ` on all ${count} ranks`,
    isFirst: ", the first difference",
    isFirstRight: ", and yet the fault is here: see the sentence at the top",
    isLater: ", after the first difference; it may only follow from it",
    scale: (factor) => `${factor} times as large as in one process`,
    several: (count) => `${count} values`,
    rank: (rank) => `rank ${rank}`,
    ranks: (ranks) => `ranks ${ranks}`,
    onRanks: (mesh) => `ranks (${mesh})`,
    sum: (count) => `sum of ${count} ranks`,
    missing: "missing",
    off: (error) => `error ${error}`,
    piece: (size) => `of a piece of ${size}`,
    moreRanks: (count) => `… and ${count} more ranks`,
    noLayout: "No layout fits the shapes of the ranks' values.",
    others: "Values of this square",
    byRank: "Errors by rank",
    first: "the first difference: look here first",
    follows: "wrong after the first: may only follow from it",
    bar: (allowed) => `norm of a rank's error; the upright line is what round-off explains: ${allowed}`,
    map: (size, isPooled) =>
      `map of a rank's piece${size && ` ${size}`}: the last dimension runs across, a cell is a ${isPooled ? "block of numbers" : "number"}`,
    ramp: (largest, isPooled) => `${largest}: ${isPooled ? "largest difference in the block" : "difference of the number"}; grey: none`,
    notFinite: "not finite",
    held: "a box for each rank: what it has of the tensor",
    many: "values in one square: wrong if one of them is",
    summand: "a summand of it",
    unlisted: "not listed",
  },
  logs: {
    title: "Logs",
    help:
      "What the workers write outside cells: prints of calls and of background threads, warnings, logging, and output of C " +
      "code. Output of a cell stands in the cell. A button shows one worker, or all: their lines are in the order in which " +
      "the panel has seen them, looking twice a second, as a log has no times; lines from before it was opened stand worker " +
      "by worker. The panel reads only while it is open, and keeps the last 2,000 lines of each worker, 200 kB at most. " +
      "Errors are: lines that begin with the name of an exception, as ValueError:, or with torch's [E0131 …]; ERROR, CRITICAL " +
      "or FATAL in capitals near the beginning; tracebacks; a crash and all that follows. Warnings are: …Warning: and the " +
      "line of code below it; WARNING near the beginning; [W0131 …]. A traceback counts as one error. In the search field Enter goes to the next match, Shift " +
      "and Enter to the one before.",
    nothing: "No worker has written anything outside cells.",
    nothingOf: (name) => `${name} has written nothing outside cells.`,
    noWorkers: ["No worker of a cluster here. Start two: ", "%cluster start 2"],
    record: "Records hold no output of workers: look at it while they run.",
    fits: { warnings: "No line is a warning or an error.", errors: "No line is an error." },
    all: "all",
    tabs: "Whose lines",
    tab: (name, errors) => (errors ? `${name}, ${plural(errors, "error")}` : name),
    find: "search",
    findTip: "Search in the lines; Enter goes to the next match, Shift and Enter to the one before",
    found: (at, count) => (count ? (at ? `${at} of ${count}` : plural(count, "match").replace("matchs", "matches")) : "no match"),
    level: "Levels of lines",
    levels: { all: "all lines", warnings: "warnings and errors", errors: "errors only" },
    save: "save",
    saveTip: "Save the lines that are shown as a file",
    fresh: (count) => `↓ ${plural(count, "new line")}`,
    end: "↓ to the end",
    earlier: (name, path) => `Earlier lines of ${name} are not shown. Its log has them: ${path}`,
    earlierOfMany: (names, path) => `Earlier lines of ${names} are not shown. Their logs have them, as ${path}`,
    read: (time) => `seen at ${time}`,
    stats: { worker: "worker", stopped: "stopped", line: "line", warning: "warning", error: "error" },
    describe: (lines, warnings, errors) => `${plural(lines, "line")}, ${plural(warnings, "warning")}, ${plural(errors, "error")}.`,
  },
  plan: {
    title: "Layouts",
    help:
      "Each point is a layout of the plan: the memory of its fullest rank to the right, the time of its step upwards. The " +
      "dashed line is where the memory of the hardware ends; a cross behind it is a layout that does not fit. Layouts on " +
      "which the program raises an error are listed below the picture. A click on a point, or the arrow keys, show its " +
      "figures and the step of its slowest rank: a lane for compute, and one for the collectives of each group. Nothing of " +
      "it has run: times and memory are simulated.",
    pictureTip: "Layouts, picture: arrow keys choose a layout",
    time: "step time",
    timeLog: "step time, logarithmic",
    memory: "most memory of a rank",
    limit: (bytes) => `memory ends at ${bytes}`,
    far: (bytes) => `memory ends at ${bytes} →`,
    of: (bytes, all) => `${bytes} of ${all}`,
    best: (name, time, memory) => `${name} is the fastest layout that fits: ${time} for a step, ${memory}.`,
    noneFits: (name, memory) => `No layout fits. The smallest is ${name}: ${memory}.`,
    allFail: "The program raises an error on each layout.",
    step: (time) => `${time} for a step`,
    peak: (share) => `${share} of the peak`,
    tokens: (count) => `${count} tokens per second and rank`,
    reserved: (bytes) => `torch's allocator reserves ${bytes}`,
    fits: "fits",
    tooLarge: "does not fit",
    fails: (name) => `${name} fails`,
    failing: "Layouts on which the program raises an error",
    timeline: (name, role) => `A step of ${name}, ${role === "all" ? "the same on all ranks" : `of its slowest role, ${role}`}`,
    beyond: (name, bytes) => `${name}: ${bytes} →`,
    stats: {
      ranks: (hardware) => `ranks of ${hardware}`,
      fits: (count) => (count === 1 ? "fits" : "fit"),
      "does not fit": (count) => (count === 1 ? "does not fit" : "do not fit"),
      fails: (count) => (count === 1 ? "fails" : "fail"),
    },
  },
  metrics: {
    title: "Metrics",
    help:
      "Each chart is a number that ranks log with rpcbench.log, over its steps: a line for each rank, or the spread of all, which is " +
      "from the lowest to the highest value, with the median. A rank is red if its last value is not finite, or if it is far from the " +
      "others: the median of its last 20 points lies outside the range of the last 20 of the others by more than three times the width " +
      "of that range, of which one percent of the largest value is the least. That needs three ranks with five finite points, and compares them up " +
      "to the last step that all have. A worker that was started again has a new line and row; its old line ends with a bar. A red line does not decide the range of its chart. Of more than 1,000 points of a rank the " +
      "lowest and the highest of each 20 are drawn; the CSV has all that are kept, the last 10,000. The table has the values at the " +
      "step under the pointer, at first the latest ones: left and right move through steps, Escape follows the latest again; a click keeps a step.",
    pictureTip: "Metrics, charts: left and right move through steps",
    hint: ["No rank has logged a number yet. In a loop: ", "rpcbench.log(loss=loss)"],
    mode: "How ranks are drawn",
    modes: { ranks: "a line for each rank", spread: "their spread" },
    scale: "Scale of the values",
    scales: { linear: "linear", log: "logarithmic" },
    save: "CSV",
    saveTip: "Save all points that the ranks have kept, as CSV",
    latest: "latest",
    step: (step) => `step ${step}`,
    between: (low, high) => `${low} to ${high}`,
    median: "the median of the ranks",
    more: (count) => `${count} more ${count === 1 ? "curve diverges" : "curves diverge"}: their rows below are red.`,
    without: (names) => `without ${names.length === 1 ? names[0] : `${names.length} ranks`}`,
    few: (some, all) => `(${some} of ${all})`,
    ended: {
      lost: (name, step, metric) => `${name} was lost after step ${step} of ${metric}`,
      restarted: (name, step, metric) => `${name} was started again after step ${step} of ${metric}`,
    },
    before: (name) => `${name} before its restart`,
    endsAt: (name, step) => `${name} ends at step ${step}`,
    isEnded: { lost: "lost", restarted: "before its restart", stopped: "stopped" },
    odd: (name, text, step, count) => `${name}: ${text} at step ${step}${count > 1 ? `, and ${count - 1} more values that are not finite` : ""}`,
    diverges: (name, metrics) => `${name} · ${metrics.join(", ")}`,
    stats: { metric: "metric", rank: "rank", lost: "lost", far: (count) => (count === 1 ? "diverges" : "diverge") },
    legend: { spread: "from the lowest to the highest rank", far: "a rank that diverges", odd: "the first value of a rank that is not finite", ended: "a rank that was lost, stopped or started again" },
  },
  resources: {
    title: "Resources",
    help:
      "Each chart is a figure of all members over the last minutes. Stacked, its height is the sum, and the dashed line is what " +
      "their machines have: cores, memory, GPUs; if the sum is far below it, the chart ends before and its title names it. " +
      "One select draws a line for each member instead, the other one chooses the minutes. The table below has the " +
      "figures at the time under the pointer, at first the latest ones: left and right move through time, Home and End go to its " +
      "ends, Escape follows the latest again; a click keeps a time. A triangle below a chart is a member that was started again, " +
      "a cross one that was lost. Bytes count at the sender and at the receiver, with those of panels themselves, but not those " +
      "of torch.distributed's collectives, which have connections of their own. Figures are asked for while a panel of " +
      "resources, traffic or workers is open: a time without one has none, and there the chart has a gap.",
    pictureTip: "Resources, charts: left and right move through time",
    wait: ["The first figures come when the members have answered.", ""],
    modes: { stack: "all members, stacked", lines: "a line for each member" },
    mode: "How members are drawn",
    span: "Minutes that are shown",
    minutes: (count) => (count === 1 ? "1 minute" : `${count} minutes`),
    ago: (seconds) => (seconds % 60 ? `−${seconds} s` : `−${seconds / 60} min`),
    now: "now",
    latest: (time) => `latest, ${time}`,
    at: (time, ago, step) => `${time}, ${ago} s before${step > 1 ? `, mean of ${step} s` : ""}`,
    all: "all",
    of: (limit) => `of ${limit}`,
    most: (value) => `at most ${value}`,
    began: (name, time) => `${name} was started again before ${time}`,
    lost: (name, time) => `${name} was lost after ${time}`,
    stats: { ready: "ready", lost: "lost" },
    describe: (minutes, parts) => `Figures of the last ${minutes}. ${parts.join(", ")}.`,
  },
  traffic: {
    title: "Traffic",
    help:
      "A row is a sender, a column a receiver, and a square the bytes that go from one to the other: the darker, the more. The " +
      "select chooses bytes per second, of the last second or of up to ten, or all bytes since the two have their connection. The edges " +
      "have the sums of a row and of a column. A click, or the arrow keys, choose a square, and the line below the picture says " +
      "all figures of the pair, with the part that went through shared memory. Each byte is counted by its sender, and panels' own " +
      "messages are counted, too. Not counted are collectives of torch.distributed, as it has connections of its own. A dashed row has " +
      "not answered of late. Figures are asked for while a panel of traffic, resources or workers is open.",
    pictureTip: "Traffic, picture: arrow keys choose a pair",
    wait: ["The first figures come when the members have answered.", ""],
    quiet: ["Nothing was sent yet. A call sends something: ", 'rpc.rpc_sync("worker1", …)'],
    spans: (seconds) => ["in the last second", `in the last ${seconds} s`, "since they connected"],
    span: "Time that is shown",
    rate: (bytes) => `${bytes}/s`,
    from: "from",
    to: "to",
    sum: "all",
    stats: { ready: "ready", sum: "between all", pair: "busy pair" },
    pair: (from, to) => `${from} → ${to}`,
    figures: (second, ten, all, seconds) => `${second}/s in the last second, ${ten}/s in the last ${seconds} s, ${all} since they connected`,
    shared: (bytes, share) => `${bytes} of it (${share}) through shared memory, the rest through a socket`,
    socket: "through a socket on one host",
    network: "over the network, between two hosts",
    silent: (name) => `${name} has not answered of late: its figures are old`,
    none: (from, to) => `${from} has sent ${to} nothing`,
    noReport: (name) => `${name} has not reported yet`,
    sent: (name, figure) => `${name} sent ${figure}`,
    received: (name, figure) => `${name} was sent ${figure}`,
    scale: (figure) => figure,
    late: "no answer of late",
    describe: (sum, span, pairs) => `${sum} ${span}. Most: ${pairs.join(", ") || "nothing"}.`,
  },
  step: {
    clock: "By so much Advance has moved the clocks of all members, which stand still otherwise",
    help:
      "Each row is a message that has arrived at its receiver and waits for your click; the first row would be delivered next. " +
      "Deliver hands it over, Drop loses it as a bad network would, Later moves it behind all others: so you choose the order in " +
      "which the members act. Until then the clocks of all members stand still, so that no deadline passes and nothing is " +
      "sent again; Advance 1 s moves them all on. Release all delivers everything and ends the stepping. On a row the keys are " +
      "Enter, Delete and l, and the arrow keys choose another row.",
  },
};
