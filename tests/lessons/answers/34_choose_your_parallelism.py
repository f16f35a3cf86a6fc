# %% layouts: wrong, does not look at the heads | does not divide the heads
# => n = range(1, workers + 1)
# => return [(a, b, c) for a in n for b in n for c in n if a * b * c == workers and layers % c == microbatches % a == 0]
# %%% layouts: wrong, does not look at the micro-batches | do not divide the micro-batches
# microbatches % a => heads % b
# %% layouts: wrong, pp with a fraction | of whole numbers
# => n = range(1, workers + 1)
# => found = [(a, b, workers / (a * b)) for a in n for b in n]
# => return [(a, b, c) for a, b, c in found if layers % c == heads % b == microbatches % a == 0]
# %%% layouts: wrong, does not look at the layers | do not divide the layers
# (a, b, workers / (a * b)) for a in n for b in n => (a, b, c) for a in n for b in n for c in n if a * b * c == workers
# layers % c == heads => heads
# %% layouts: wrong, each dimension below all workers | is missing
def layouts(workers, layers, heads, microbatches):
    n = range(1, workers)
    return [
        (a, b, c)
        for a in n
        for b in n
        for c in n
        if a * b * c == workers and layers % c == heads % b == microbatches % a == 0
    ]


# %%% layouts: wrong, tp and pp exchanged | does not divide the heads
# , workers => , workers + 1
# b, c => c, b
# %%% layouts: wrong, powers of two alone | 6 workers, 6 layers
# range(1, workers) => (1, 2, 4, 8, 16)
# %%% layouts: wrong, no more than all workers used | needs 1 workers
# , workers => , workers + 1
# a * b * c == workers => workers % (a * b * c) == 0
# %%% layouts: wrong, lists for triples | is no triple
# , workers => , workers + 1
# (a, b, c) => [a, b, c]
# %%% layouts: wrong, an iterator | a list is wanted
# -     n = range(1, workers)
# -     return [
# +     n = range(1, workers + 1)
# +     return (
# -     ]
# +     )
# %% layouts: wrong, no more stages than layers | in (1, 2, 4) the stages do not divide the layers
# layers % pp == 0 => pp <= layers
# %% layouts: wrong, no more ranks than heads | tensor parallel does not divide the heads
# tp in range(1, workers + 1) => tp in range(1, min(workers, heads) + 1)
# heads % tp == 0 and microbatches => microbatches
# %% layouts: wrong, no more replicas than micro-batches | the replicas do not divide the micro-batches
# dp in range(1, workers + 1) => dp in range(1, min(workers, microbatches) + 1)
# 0 and microbatches % dp == 0 => 0
# %% held: wrong, no ZeRO | dp=4, tp=1, pp=1
# (4 + 12 / dp) => 16
# %% held: wrong, ZeRO for everything | dp=4, tp=1, pp=1
# (4 + 12 / dp) => 16 / dp
# %% held: wrong, activations whole on each rank | dp=1, tp=4, pp=1
# => under_way = min(pp, microbatches // dp)
# => return parameters * (4 + 12 / dp) / (tp * pp) + under_way * activations / pp
# %% held: wrong, a pipeline cuts the layers alone | dp=1, tp=4, pp=1
# => return (parameters * (4 + 12 / dp) + min(pp, microbatches // dp) * activations) / pp
# %% held: wrong, whole bytes of state | dp=8, tp=1, pp=2
# => return (parameters * (4 + 12 // dp) + min(pp, microbatches // dp) * activations) / (tp * pp)
# %% held: wrong, activations of all micro-batches | dp=1, tp=1, pp=1
# => return (parameters * (4 + 12 / dp) + microbatches / dp * activations) / (tp * pp)
# %% held: wrong, always pp micro-batches under way | dp=4, tp=1, pp=4
# => return (parameters * (4 + 12 / dp) + pp * activations) / (tp * pp)
# %% held: wrong, micro-batches not dealt to the replicas | dp=4, tp=1, pp=4
# => return (parameters * (4 + 12 / dp) + min(pp, microbatches) * activations) / (tp * pp)
# %% held: wrong, one micro-batch under way | dp=1, tp=1, pp=4
# => return (parameters * (4 + 12 / dp) + activations) / (tp * pp)
# %% step_time: wrong, no bubble | dp=1, tp=1, pp=4
# (microbatches / dp + pp - 1) => microbatches / dp
# %% step_time: wrong, the whole gradient | dp=2, tp=2, pp=1
# gradient / (tp * pp) => gradient
# %% step_time: wrong, the vector cut | dp=1, tp=4, pp=1
# vector, tp => vector / tp, tp
# %% step_time: wrong, all layers in each stage | dp=2, tp=2, pp=3
# / pp * 4 => * 4
# %% step_time: wrong, one all-reduce in each layer | dp=1, tp=4, pp=1
# 4 * all_reduce => all_reduce
# %% step_time: wrong, micro-batches not dealt | dp=4, tp=1, pp=1
# / dp + pp => + pp
# %% step_time: wrong, gradients added up for each micro-batch | dp=4, tp=1, pp=1
# turn + all_reduce(gradient / (tp * pp), dp) => (turn + all_reduce(gradient / (tp * pp), dp))
# %% step_time: wrong, arguments of all_reduce exchanged | takes a number of ranks
# => turn = work / (tp * pp) + layers / pp * 4 * all_reduce(tp, vector + 0.5)
# => return (microbatches / dp + pp - 1) * turn + all_reduce(dp, gradient / (tp * pp))
# %% choose: wrong, does not look at the budget | room for 100
# => n = range(1, workers + 1)
# => possible = [(a, b, workers // (a * b)) for a in n for b in n if workers % (a * b) == per_host % b == 0]
# => possible = [(a, b, c) for a, b, c in possible if layers % c == heads % b == microbatches % a == 0]
# => return min(possible, key=time, default=None)
# %%% choose: wrong, forgets the layers | that layout is not possible
# layers % c == heads => heads
# possible, => [layout for layout in possible if held(layout) <= budget],
# %%% choose: wrong, tensor parallel over several hosts | that layout is not possible
# per_host % b == 0 => 0
# possible, => [layout for layout in possible if held(layout) <= budget],
# %%% choose: wrong, tensor parallel up to the size of a host | does not divide the 6 workers of a host
# per_host % b == 0 => 0 and b <= per_host
# possible, => [layout for layout in possible if held(layout) <= budget],
# %%% choose: wrong, fails where nothing fits | raised ValueError
# possible, key=time, default=None => [layout for layout in possible if held(layout) <= budget], key=time
# %%% choose: wrong, the smallest and not the fastest | the best is
# possible, key=time => [layout for layout in possible if held(layout) <= budget], key=held
# %%% choose: wrong, forgets the heads | that layout is not possible
# heads % b == microbatches => microbatches
# possible, => [layout for layout in possible if held(layout) <= budget],
# %%% choose: wrong, its time and not the layout | the best is
# possible, key=time => [time(layout) for layout in possible if held(layout) <= budget]
# %% choose: wrong, always a whole host for tensor parallel | the best is
def choose(workers, per_host, layers, heads, microbatches, time, held, budget):
    tp = min(per_host, heads, workers)
    n = range(1, workers + 1)
    possible = [(a, tp, workers // (a * tp)) for a in n if workers % (a * tp) == 0]
    possible = [(a, b, c) for a, b, c in possible if layers % c == heads % b == microbatches % a == per_host % b == 0]
    return min([layout for layout in possible if held(layout) <= budget], key=time, default=None)


# %% choose: wrong, a layout that fills the budget does not fit | room for 121.875
def choose(workers, per_host, layers, heads, microbatches, time, held, budget):
    fits = []
    for dp in range(1, workers + 1):
        for tp in range(1, workers + 1):
            if workers % (dp * tp) or per_host % tp or heads % tp or microbatches % dp:
                continue
            layout = (dp, tp, workers // (dp * tp))
            if layers % layout[2] == 0 and held(layout) < budget:
                fits.append(layout)
    return min(fits, key=time, default=None)
