# %% layouts: wrong, columns are dimension 1 | enter.weight is not Shard(1): its columns are its outputs
# "enter.weight": "Shard(0)" => "enter.weight": "Shard(1)"
# %% layouts: wrong, rows are dimension 0 | up.weight is not Shard(0): its rows are its inputs
# "up.weight": "Shard(1)" => "up.weight": "Shard(0)"
# %% layouts: wrong, the output of columns is whole | enter is not Replicate: each rank has all rows
# "enter": "Shard(1)" => "enter": "Replicate"
# %% layouts: wrong, the rows of the batch are cut | enter is not Shard(0): each rank has all rows
# "enter": "Shard(1)" => "enter": "Shard(0)"
# %% layouts: wrong, a bias is cut with its weight | up.bias is not Shard(0): it is added after the sum
# "up.bias": "Replicate" => "up.bias": "Shard(0)"
# %% layouts: wrong, a part of the bias on each rank | up.bias is not Partial: it is added after the sum
# "up.bias": "Replicate" => "up.bias": "Partial"
# %% layouts: wrong, summands leave the layer | up is not Partial: the layer adds its parts up
# "up": "Replicate" => "up": "Partial"
# %% layouts: wrong, as in the program above | enter is not Replicate
layouts = {
    "enter.weight": "Shard(0)",
    "enter": "Replicate",
    "up.weight": "Shard(0)",
    "up.bias": "Shard(0)",
    "up": "Shard(1)",
    "down": "Replicate",
}
# %% layouts: wrong, the next layer is cut, too | down is not Shard(1): the layer is not cut
# "down": "Replicate" => "down": "Shard(1)"
# %% layouts: wrong, a word of lesson 23 | The words are Replicate, Shard(0), Shard(1), Partial, not ['rows']
# "up.weight": "Shard(1)" => "up.weight": "rows"
# %% layouts: wrong, a value too few | The names are enter.weight, enter, up.weight
# -     "down": "Replicate",
# %% layouts: wrong, a list | A dict from six names to words
layouts = ["Shard(0)", "Shard(1)", "Shard(1)", "Replicate", "Replicate", "Replicate"]
# %% in_forward: wrong, the last one | `gradient head.bias` is wrong, but another value is wrong before it
in_forward = ("gradient", "head.bias", "b")
# %% in_forward: wrong, the loss | `loss (model)` is wrong, but another value
in_forward = ("loss", "", "b")
# %% in_forward: wrong, the layer after it | `forward head` is wrong, but another value
in_forward = ("forward", "head", "b")
# %% in_forward: wrong, the layer before it | `forward up` is not wrong: the report says 'right'
in_forward = ("forward", "up", "b")
# %% in_forward: wrong, the largest error | it is not 'a'. Sizes say little
in_forward = ("forward", "down", "a")
# %% in_forward: wrong, by collectives | it is not 'c'. In this layer the collective is missing
in_forward = ("forward", "down", "c")
# %% in_forward: wrong, a parameter for a module | The report has no value `forward down.weight`
in_forward = ("forward", "down.weight", "b")
# %% in_forward: wrong, no phase | 'down' is no phase of this report
in_forward = ("down", "forward", "b")
# %% in_forward: wrong, without a reason | A phase, a name and a letter are wanted
in_forward = ("forward", "down")
# %% in_forward: wrong, a letter that is not there | one of the letters a, b and c, not 'd'
in_forward = ("forward", "down", "d")
# %% in_backward: wrong, the layer with the fault | `backward up` is not wrong: the report says 'right'
in_backward = ("backward", "up", "a")
# %% in_backward: wrong, its parameter | `gradient up.weight` is not wrong
in_backward = ("gradient", "up.weight", "a")
# %% in_backward: wrong, the summands themselves | `backward enter` is not wrong
in_backward = ("backward", "enter", "a")
# %% in_backward: wrong, the second one | `gradient enter.bias` is wrong, but another value
in_backward = ("gradient", "enter.bias", "a")
# %% in_backward: wrong, round-off | it is not 'b'. Each rank is far off alone
in_backward = ("gradient", "enter.weight", "b")
# %% in_backward: wrong, what is whole is not compared | it is not 'c'. It is compared as all others are
in_backward = ("gradient", "enter.weight", "c")
# %% in_backward: wrong, a module for a parameter | The report has no value `gradient enter`
in_backward = ("gradient", "enter", "a")
# %% in_loss: wrong, the gradients | `gradient enter.weight` is wrong, but another value
in_loss = ("gradient", "enter.weight", [0.8, 0.2])
# %% in_loss: wrong, the output | `forward (model)` is not wrong: the report says 'right'
in_loss = ("forward", "", [0.8, 0.2])
# %% in_loss: wrong, the name that is printed | The report has no value `loss (model)`
in_loss = ("loss", "(model)", [0.8, 0.2])
# %% in_loss: wrong, the mean of means | Equal weights are the mean of means
in_loss = ("loss", "", [0.5, 0.5])
# %% in_loss: wrong, the other way round | with more rows that count has the larger weight
in_loss = ("loss", "", [0.2, 0.8])
# %% in_loss: wrong, numbers of rows | yours would be 40
in_loss = ("loss", "", [32, 8])
# %% in_loss: wrong, four to one of three | With 0.75 and 0.25 a row of rank 0
in_loss = ("loss", "", [0.75, 0.25])
# %% in_loss: wrong, one weight | A list of two numbers
in_loss = ("loss", "", 0.8)
# %% in_loss: right, a tuple
in_loss = ("loss", "", (0.8, 0.2))
# %% program1: wrong, the block around it | `forward blocks.1` is wrong, but another value
program1 = ("forward", "blocks.1", "too often")
# %% program1: wrong, the other block | `forward blocks.0.down` is not wrong
program1 = ("forward", "blocks.0.down", "too often")
# %% program1: wrong, the bias by its name | The report has no value `forward blocks.1.down.bias`
program1 = ("forward", "blocks.1.down.bias", "too often")
# %% program1: wrong, the gradient of the bias | `gradient blocks.1.down.bias` is wrong, but another value
program1 = ("gradient", "blocks.1.down.bias", "too often")
# %% program1: wrong, a reduction is missing | the kind is not 'left out'. The ranks agree
program1 = ("forward", "blocks.1.down", "left out")
# %% program1: wrong, all of it twice | the kind is not 'scale'
program1 = ("forward", "blocks.1.down", "scale")
# %% program1: wrong, a kind of its own | The kinds are 'left out'
program1 = ("forward", "blocks.1.down", "bias")
# %% program2: wrong, the words | `forward embed` is not wrong
program2 = ("forward", "embed", "own part")
# %% program2: wrong, the next layer | `forward feed.norm` is wrong, but another value
program2 = ("forward", "feed.norm", "own part")
# %% program2: wrong, the loss | `loss (model)` is wrong, but another value
program2 = ("loss", "", "own part")
# %% program2: wrong, the table itself | `initial positions.weight` is not wrong
program2 = ("initial", "positions.weight", "own part")
# %% program2: wrong, the table as an output | The report has no value `forward positions.weight`
program2 = ("forward", "positions.weight", "own part")
# %% program2: wrong, a reduction is missing | the kind is not 'left out'. Both ranks have the values of the first piece
program2 = ("forward", "positions", "left out")
# %% program2: wrong, they differ | the kind is not 'apart'
program2 = ("forward", "positions", "apart")
# %% program3: wrong, gradients of outputs | `backward enter` is not wrong
program3 = ("backward", "enter", "scale")
# %% program3: wrong, the last one | `gradient head.bias` is wrong, but another value
program3 = ("gradient", "head.bias", "scale")
# %% program3: wrong, the loss | `loss (model)` is not wrong
program3 = ("loss", "", "scale")
# %% program3: wrong, the optimizer | 'step' is no phase of this report
program3 = ("step", "enter.weight", "scale")
# %% program3: wrong, a summand twice | the kind is not 'too often'
program3 = ("gradient", "enter.weight", "too often")
# %% program3: wrong, a reduction is missing | the kind is not 'left out'. All gradients are twice
program3 = ("gradient", "enter.weight", "left out")
# %% program4: wrong, a cut parameter | `gradient blocks.0.up.weight` is wrong, but another value
program4 = ("gradient", "blocks.0.up.weight", "own part")
# %% program4: wrong, gradients of outputs | `backward blocks.0.up` is not wrong
program4 = ("backward", "blocks.0.up", "own part")
# %% program4: wrong, a module | The report has no value `gradient enter`
program4 = ("gradient", "enter", "own part")
# %% program4: wrong, a factor | the kind is not 'scale'. The factors of the ranks are no whole numbers
program4 = ("gradient", "enter.weight", "scale")
# %% program4: wrong, a reduction of the gradients is missing | the kind is not 'left out'
program4 = ("gradient", "enter.weight", "left out")
# %% program4: wrong, they differ | the kind is not 'apart'
program4 = ("gradient", "enter.weight", "apart")
# %% program4: wrong, the place alone | A phase, a name and a kind are wanted
program4 = ("gradient", "enter.weight")
# %% program5: wrong, the gradients | `gradient enter.weight` is not wrong
program5 = ("gradient", "enter.weight", "apart")
# %% program5: wrong, they began so | `initial enter.weight` is not wrong
program5 = ("initial", "enter.weight", "apart")
# %% program5: wrong, the last one | `step head.bias` is wrong, but another value
program5 = ("step", "head.bias", "apart")
# %% program5: wrong, a word for a phase | 'optimizer' is no phase of this report
program5 = ("optimizer", "enter.weight", "apart")
# %% program5: wrong, the step is too small | the kind is not 'scale'. One rank has what one process has
program5 = ("step", "enter.weight", "scale")
# %% program5: wrong, a broadcast is missing | the kind is not 'left out'
program5 = ("step", "enter.weight", "left out")
# %% mend: wrong, as it was | wrong, first at gradient enter.weight: the gradients have the right direction
# => norm = sum(gradient.square().sum() for gradient in cut + whole).sqrt()
# => for gradient in cut + whole:
# =>     gradient *= (limit / norm).clamp(max=1)
# %% mend: wrong, what is whole counts on each rank | is in the sum once for each rank
# => square = sum(gradient.square().sum() for gradient in cut + whole)
# => all_reduce(square)
# => for gradient in cut + whole:
# =>     gradient *= (limit / square.sqrt()).clamp(max=1)
# %%% mend: wrong, the mean of the squares | the gradients have the right direction
# all_reduce(square) => all_reduce(square.div_(2))
# %% mend: wrong, norms are added | only squares add up
# all_reduce(square) => all_reduce(square.sqrt_())
# (square + sum => (square.square() + sum
# %% mend: wrong, the pieces alone | the gradients have the right direction
# (square + sum(gradient.square().sum() for gradient in whole)).sqrt() => square.sqrt()
# %% mend: wrong, the root is forgotten | the gradients have the right direction
# whole)).sqrt() => whole))
# %% mend: wrong, small gradients grow | With a limit of 1000, the program is wrong
# (limit / norm).clamp(max=1) => limit / norm
# %% mend: wrong, only the pieces are changed | With a limit of 0.1, the program is wrong
# for gradient in cut + whole => for gradient in cut
# %% mend: wrong, new tensors | The gradients are as they were
# gradient *= (limit / norm).clamp(max=1) => gradient = gradient * (limit / norm).clamp(max=1)
# %% mend: wrong, waits for a result that is none | raised TypeError
# -     all_reduce(square)
# -     norm = (square + sum(gradient.square().sum() for gradient in whole)).sqrt()
# +     norm = (all_reduce(square) + sum(gradient.square().sum() for gradient in whole)).sqrt()
# %% mend: wrong, the gradients are added up | a limit of 0.1, the program is wrong
# -     square = sum(gradient.square().sum() for gradient in cut)
# -     all_reduce(square)
# +     for gradient in cut:
# +         all_reduce(gradient)
# +     square = sum(gradient.square().sum() for gradient in cut)
