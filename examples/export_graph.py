"""Writes the GE graph of a model's decode step, as text and as a picture, and the exported step.

    python examples/export_graph.py [--folder DIR]    # DIR/decode.txt, DIR/decode.svg
    python examples/export_graph.py --model           # DIR/decode.pt2, DIR/decode.air, too

The text is torchair's own dump of the graph after its passes (a ``GraphDef`` of protobuf). The
picture shows its nodes from the first to the last, without weights and constants: the operators of
this package in orange, cache writes in blue. ``decode.pt2`` is torch.export's, with weights and
cache; ``decode.air`` is torchair's offline graph, with the weights, which CANN's ``atc`` compiles
to a program without Python. Each is loaded again and run: the second one on the simulator only.
Requirements: those of compile_torchair.py.
"""

from options import Help, check_folder  # first; options.py says why

# isort: split
import argparse
import collections
import html
import sys
import tempfile
from pathlib import Path

from compile_torchair import CHECKPOINT, Step, load, start_npu

# isort: split
import torch

from custom_pypto import converter
from custom_pypto.descriptions import OPS, ge_type

OURS, WRITES = {*map(ge_type, OPS)}, {"ScatterNdUpdate"}
HIDDEN = {"Data", "RefData", "Const", "NetOutput"}
WIDTH, HEIGHT, GAP_X, GAP_Y = 190, 34, 24, 26  # pixels of a node and between nodes
STYLE = """
text { font: 12px sans-serif; text-anchor: middle }
rect { fill: #f4f4f4; stroke: #999; rx: 6px }
.ours rect { fill: #ffb454; stroke: #a65e00 } .ours text { font-weight: bold }
.writes rect { fill: #9ecbff; stroke: #1f5fa8 }
path { fill: none; stroke: #bbb } path.ours { stroke: #a65e00; stroke-width: 1.5px }
"""


class Demo:
    """The demo's model, a cache that holds its prompt, and the first question."""

    def __init__(self):
        self.model, tokenizer, prompt, dialogue = load(CHECKPOINT, prompt_tokens=32, questions=1)
        texts = prompt, dialogue[0][0]
        ids = [tokenizer(text, return_tensors="pt").input_ids.npu() for text in texts]
        self.prompt, self.question = ids

    def cache(self):
        from custom_pypto import models

        cache = models.PagedCache(self.model, batch_size=1, max_cache_len=64)
        self.model(self.prompt, cache=cache, logits_to_keep=1)
        return cache

    def arguments(self):
        """Those of :class:`Step` for the question."""
        return self.question, torch.tensor([[self.prompt.size(1)]], device="npu")

    def logits(self):
        """Of the question, eager."""
        return Step(self.model, self.cache())(*self.arguments())


def convert_decode_step(demo, folder):
    """The graph of the decode step, which torchair writes into ``folder``."""
    import torchair
    from google.protobuf import text_format
    from torchair._ge_concrete_graph.ge_ir_pb2 import GraphDef

    config = torchair.CompilerConfig()
    config.debug.graph_dump.type = "txt"
    backend = torchair.get_npu_backend(compiler_config=config)
    step = torch.compile(demo.model.forward, backend=backend, fullgraph=True, dynamic=False)
    with tempfile.TemporaryDirectory() as dumps:
        config.debug.graph_dump.path = dumps
        try:
            token, position_ids = demo.arguments()
            step(token, position_ids=position_ids, cache=demo.cache())
        except RuntimeError as error:  # torchair writes the graph before compiling it
            print(f"GE does not compile the graph: {error}", file=sys.stderr)
        (dump,) = Path(dumps).glob("dynamo_optimized_*.txt")
        text = dump.read_text()
    (folder / "decode.txt").write_text(text)
    return text_format.Parse(text, GraphDef())


def export_program(demo, path):
    """Writes the step by torch.export; the logits of the loaded one."""
    # strict: torch's tracer finds the tensors of the cache, which become buffers of the program
    program = torch.export.export(Step(demo.model, demo.cache()), demo.arguments(), strict=True)
    torch.export.save(program, path)
    return torch.export.load(path).module()(*demo.arguments())


def export_offline(demo, path):
    """Writes the step as torchair's offline graph, for CANN's ``atc``."""
    import torchair

    torchair.dynamo_export(
        *demo.arguments(),
        model=Step(demo.model, demo.cache()),
        export_path=str(path.parent),
        export_name=path.stem,
        config=torchair.CompilerConfig(),
    )


def run_offline(demo, path):
    """The logits of an offline graph on the simulator. It has the weights; its inputs are those of
    the step, then the cache, whose pools it writes in place. It returns the new lengths after the
    logits, which the caller would have to copy into the cache."""
    from torchair._ge_concrete_graph.ge_ir_pb2 import ModelDef

    from custom_pypto.simulation.ascend_host import ge_executor

    (definition,) = ModelDef.FromString(path.read_bytes()).graph
    cache = demo.cache()
    inputs = [*demo.arguments(), cache.block_table, cache.lengths, cache.seen, *cache.store.pools()]
    placements = definition.attr["_input_placements"].list.i
    del placements[len(inputs) :]  # the weights' are among them
    graph = ge_executor.Graph(path.stem)
    graph.load(definition)
    graph.compile()
    return graph.run(inputs)[0]


def layers(graph):
    """The drawn nodes, in layers, and the edges between them as pairs of names.

    A node is right above the first consumer of its output; within a layer, nodes are in the order
    of their inputs, so that few edges cross.
    """
    shown = {node.name: node for node in graph.op if node.type not in HIDDEN}
    edges, depth = [], {}
    for node in shown.values():  # a graph lists a node after its inputs
        sources = dict.fromkeys(name.rpartition(":")[0] for name in node.input)
        sources = [name for name in sources if name in shown]
        edges += [(name, node.name) for name in sources]
        depth[node.name] = 1 + max((depth[name] for name in sources), default=-1)
    taken, takers = collections.defaultdict(list), collections.defaultdict(list)
    for source, target in edges:
        taken[target].append(source)
        takers[source].append(target)
    for name in reversed(shown):
        depth[name] = min((depth[taker] - 1 for taker in takers[name]), default=depth[name])
    rows, place = collections.defaultdict(list), {}
    for name in sorted(depth, key=depth.get):
        rows[depth[name]].append(name)
    for row in rows.values():
        row.sort(key=lambda name: sum(place[s] for s in taken[name]) / max(len(taken[name]), 1))
        place |= {name: i - len(row) / 2 for i, name in enumerate(row)}
    return [[shown[name] for name in row] for row in rows.values()], edges


def kind(node):
    return "ours" if node.type in OURS else "writes" if node.type in WRITES else ""


def picture(graph):
    """The graph as SVG."""
    rows, edges = layers(graph)
    width = max(map(len, rows), default=0) * (WIDTH + GAP_X) + GAP_X
    height = len(rows) * (HEIGHT + GAP_Y) + GAP_Y
    boxes, lines, at, kinds = [], [], {}, {}
    for depth, row in enumerate(rows):
        for i, node in enumerate(row):
            x = width / 2 + (i - len(row) / 2) * (WIDTH + GAP_X) + GAP_X / 2
            y = GAP_Y + depth * (HEIGHT + GAP_Y)
            at[node.name], kinds[node.name] = (x + WIDTH / 2, y), kind(node)
            noted = node.output_desc[0].attr["_meta"].s.decode() if node.output_desc else ""
            shape = noted.partition("shape=torch.Size(")[2].rstrip(")")
            boxes.append(
                f'<g class="{kind(node)}"><title>{html.escape(node.name)}</title>'
                f'<rect x="{x:.0f}" y="{y}" width="{WIDTH}" height="{HEIGHT}"/>'
                f'<text x="{x + WIDTH / 2:.0f}" y="{y + 15}">{html.escape(node.type)}</text>'
                f'<text x="{x + WIDTH / 2:.0f}" y="{y + 29}">{html.escape(shape)}</text></g>'
            )
    for source, target in edges:
        (x0, y0), (x1, y1) = at[source], at[target]
        y0, middle = y0 + HEIGHT, (y0 + HEIGHT + y1) / 2
        lines.append(
            f'<path class="{"ours" if "ours" in (kinds[source], kinds[target]) else ""}" '
            f'd="M{x0:.0f} {y0}C{x0:.0f} {middle:.0f} {x1:.0f} {middle:.0f} {x1:.0f} {y1}"/>'
        )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">',
            f'<style>{STYLE}</style><rect width="100%" height="100%" style="fill: white"/>',
            *lines,
            *boxes,
            "</svg>\n",
        ]
    )


def attributes(node):
    values = []
    for name, value in sorted(node.attr.items()):
        if not name.startswith("_"):  # torchair's own
            value = getattr(value, value.WhichOneof("value"))
            values.append(f"{name}={value.decode() if isinstance(value, bytes) else value}")
    return ", ".join(values)


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--folder", type=Path, default=Path("ge_graph"), help="created if missing")
    parser.add_argument("--model", action="store_true", help="also the exported step")
    args = parser.parse_args()
    check_folder(parser, "--folder", args.folder)
    real = start_npu()
    converter.register()
    folder, demo = args.folder.resolve(), Demo()
    graph = convert_decode_step(demo, folder)
    (args.folder / "decode.svg").write_text(picture(graph))

    count = collections.Counter(node.type for node in graph.op)
    print(f"decode step: {len(graph.op)} nodes of {len(count)} types, among them")
    for node in graph.op:
        if node.type in OURS:
            print(f"  {node.type}  {node.name}: {attributes(node)}")
    print(f"  {count['ScatterNdUpdate']} ScatterNdUpdate, into the cache in place")
    print(f"  {count['TensorMove']} TensorMove (copies)")
    print(f"written: {args.folder / 'decode.txt'}, {args.folder / 'decode.svg'}")
    if args.model:
        export_model(demo, folder, real)


def export_model(demo, folder, real):
    """Writes the exported step in both formats, and runs each."""
    expected = demo.logits()
    program, offline = folder / "decode.pt2", folder / "decode.air"
    loaded = {program: export_program(demo, program)}
    export_offline(demo, offline)
    if real:
        print(f"next: atc --framework=1 --model={offline} --output=decode --soc_version=SOC")
    else:
        loaded[offline] = run_offline(demo, offline)
    for path, logits in loaded.items():
        apart = (logits - expected).abs().max().item()
        print(f"written: {path}, loaded and run: {'equal to' if apart == 0 else apart} eager's")


if __name__ == "__main__":
    main()
