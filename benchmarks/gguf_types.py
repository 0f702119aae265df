"""A GGUF file's model in another type: the weights' values, rounded once more to the type's blocks, or a folder.

    python benchmarks/gguf_types.py IN.gguf OUT.gguf Q8_0
    python benchmarks/gguf_types.py IN.gguf OUT_FOLDER bfloat16

IN may be `embedded`. The gguf package rounds; it has no K types.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import common

FOLDERS = ("bfloat16", "float16", "float32")
TYPES = ("BF16", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *FOLDERS)


def rewrite(source: Path, target: Path, kind: str) -> None:
    """Write the file `target`, whose matrices have the type `kind`, one of GGMLQuantizationType's names; or a Hugging
    Face folder of the dtype `kind`."""
    if kind in FOLDERS:
        from vllm.loader.gguf.convert import converted_folder

        shutil.copytree(converted_folder(source, kind), target)
        return
    import gguf

    reader, wanted = gguf.GGUFReader(source), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            element = entry.types[1] if len(entry.types) > 1 else None
            writer.add_key_value(name, entry.contents(), entry.types[0], element)
    for tensor in reader.tensors:
        if len(tensor.shape) < 2 or tensor.tensor_type == wanted:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()


def main() -> None:
    parser = common.make_parser(__doc__.partition("\n")[0], model=False)
    parser.add_argument("source", metavar="IN.gguf", type=Path)
    parser.add_argument("target", metavar="OUT", type=Path)
    parser.add_argument("kind", metavar="TYPE", choices=TYPES, help=", ".join(TYPES))
    args = parser.parse_args()
    from vllm.loader.resolve import embedded_model_path

    source = embedded_model_path() if str(args.source) == "embedded" else args.source
    if source is None or not Path(source).is_file():
        parser.error(f"{args.source}: there is no such file")
    if args.target.exists():
        parser.error(f"{args.target} is there")
    rewrite(Path(source), args.target, args.kind)


if __name__ == "__main__":
    main()
