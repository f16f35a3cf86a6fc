# %% layouts: wrong, does not look at the micro-batches | do not divide the micro-batches
# => n = range(1, workers + 1)
# => return [(a, b, c) for a in n for b in n for c in n if a * b * c == workers and layers % c == heads % b == 0]
# %%% layouts: wrong, does not look at the heads | does not divide the heads
# heads % b => microbatches % a
# %% layouts: wrong, does not look at the layers | do not divide the layers
# => n = range(1, workers + 1)
# => found = [(a, b, c) for a in n for b in n for c in n if a * b * c == workers]
# => return [(a, b, c) for a, b, c in found if heads % b == microbatches % a == 0]
# %%% layouts: wrong, pp with a fraction | of whole numbers
# (a, b, c) for a in n for b in n for c in n if a * b * c == workers => (a, b, workers / (a * b)) for a in n for b in n
# heads % => layers % c == heads %
# %% layouts: right, lists for triples
# => n = range(1, workers + 1)
# => return [
# =>     [a, b, c]
# =>     for a in n
# =>     for b in n
# =>     for c in n
# =>     if a * b * c == workers and layers % c == heads % b == microbatches % a == 0
# => ]
# %%% layouts: wrong, each dimension below all workers | is missing
# workers + 1 => workers
# [a, b, c] => (a, b, c)
# %%% layouts: wrong, tp and pp exchanged | does not divide the heads
# [a, b, c] => (a, c, b)
# %%% layouts: wrong, powers of two alone | 6 workers, 6 layers
# range(1, workers + 1) => (1, 2, 4, 8, 16)
# [a, b, c] => (a, b, c)
# %%% layouts: wrong, no more than all workers used | needs 1 workers
# [a, b, c] => (a, b, c)
# a * b * c == workers => workers % (a * b * c) == 0
# %%% layouts: right, a set
# -     return [
# -         [a, b, c]
# +     return {
# +         (a, b, c)
# -     ]
# +     }
# %%% layouts: right, an iterator
# -     return [
# -         [a, b, c]
# +     return (
# +         (a, b, c)
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
# %% on_ranks: wrong, all copies count | are counted once for each
# gradient.square().sum() / copies => gradient.square().sum()
# %% on_ranks: wrong, vectors count on each rank of tp | are counted once for each
# dp if is_cut else dp * tp => dp
# %% on_ranks: wrong, replicas count | All replicas along `dp` are counted
# dp if is_cut else dp * tp => 1 if is_cut else tp
# %% on_ranks: wrong, pieces are divided, too | Pieces are divided by `tp` as well
# dp if is_cut else dp * tp => dp * tp
# %% on_ranks: wrong, adds up norms | Squares can be added up, norms cannot
# -     dist.all_reduce(square)
# +     square.sqrt_()
# +     dist.all_reduce(square)
# square.sqrt().item() => square.item()
# %% on_ranks: wrong, adds up the norms of gradients | The norms of the gradients were added up. Squares can be
# gradient.square().sum() / copies => gradient.norm() / copies
# square.sqrt().item() => square.item()
# %% on_ranks: wrong, adds up norms by the root of the copies | The norms of the gradients were added up, and not
# gradient.square().sum() / copies => gradient.norm() / copies**0.5
# square.sqrt().item() => square.item()
# %% on_ranks: wrong, takes sizes for groups | are numbers, the sizes of the mesh, and no process groups
# -     dist.all_reduce(square)
# +     dist.all_reduce(square, group=tp)
# %% on_ranks: right, a tensor
# return square.sqrt().item() => return square.sqrt()
# %% on_ranks: wrong, forgets the root | That is the square of the norm
# square.sqrt().item() => square.item()
# %% on_ranks: wrong, this rank alone | Only what this rank has is counted
# dp if is_cut else dp * tp => 1
# -     dist.all_reduce(square)
# %% on_ranks: wrong, gathers the gradients | bytes at once. A norm needs one number
# -     dist.all_reduce(square)
# +     dist.all_reduce(square)
# +     dist.all_reduce(torch.zeros(16))
# %% on_ranks: wrong, returns nothing | It has no `return`
# return square => square
# %% on_ranks: wrong, only the first ranks of tp add up | for ever
# -     dist.all_reduce(square)
# +     if dist.get_rank() % tp == 0:
# +         dist.all_reduce(square)
# %% choose: wrong, forgets the heads | that layout is not possible
# => n = range(1, workers + 1)
# => possible = [(a, b, workers // (a * b)) for a in n for b in n if workers % (a * b) == per_host % b == 0]
# => possible = [(a, b, c) for a, b, c in possible if layers % c == microbatches % a == 0]
# => return min([layout for layout in possible if held(layout) <= budget], key=time, default=None)
# %%% choose: wrong, forgets the layers | that layout is not possible
# layers % c => heads % b
# %%% choose: wrong, tensor parallel over several hosts | that layout is not possible
# per_host % b == 0 => 0
# microbatches % => heads % b == microbatches %
# %%% choose: wrong, tensor parallel up to the size of a host | does not divide the 6 workers of a host
# per_host % b == 0 => 0 and b <= per_host
# microbatches % => heads % b == microbatches %
# %%% choose: wrong, fails where nothing fits | raised ValueError
# microbatches % => heads % b == microbatches %
# time, default=None => time
# %%% choose: wrong, the smallest and not the fastest | the best is
# microbatches % => heads % b == microbatches %
# =time => =held
# %% step_time: wrong, whole bytes | 5 digits)
# all_reduce(gradient / (tp * pp), dp) => all_reduce(gradient // (tp * pp), dp)
# %% choose: wrong, its time and not the layout | a triple (dp, tp, pp) or None is wanted
# => n = range(1, workers + 1)
# => possible = [(a, b, workers // (a * b)) for a in n for b in n if workers % (a * b) == per_host % b == 0]
# => possible = [(a, b, c) for a, b, c in possible if layers % c == heads % b == microbatches % a == 0]
# => return min([time(layout) for layout in possible if held(layout) <= budget], default=None)
# %%% choose: wrong, does not look at the budget | room for 100
# [time(layout) for layout in possible if held(layout) <= budget] => possible, key=time
# %% choose: wrong, always a whole host for tensor parallel | the best is
# => tp = min(per_host, heads, workers)
# => n = range(1, workers + 1)
# => possible = [(a, tp, workers // (a * tp)) for a in n if workers % (a * tp) == 0]
# => possible = [(a, b, c) for a, b, c in possible if layers % c == heads % b == microbatches % a == per_host % b == 0]
# => return min([layout for layout in possible if held(layout) <= budget], key=time, default=None)
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
