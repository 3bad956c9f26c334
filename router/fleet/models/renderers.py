"""Tokenizers of models, each loaded once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping

from router.fleet.models.tokenizer_files import TokenizerFileStore
from router.tokens.rendering import Renderer
from router.tokens.template_processes import TemplateProcesses
from shared.settings import Settings, chat_template_text
from shared.wire import Vision


class Renderers:
    """Models with the same files and settings share a renderer, for as long as one of them uses it.

    The library that reads a tokenizer's file blocks the interpreter for a tenth of a second or
    more: other streams should not wait for that when a new version of a model joins.
    """

    def __init__(
        self, files: TokenizerFileStore, processes: TemplateProcesses | None = None
    ) -> None:
        """Chat templates run in ``processes``, by default in this one."""
        self._files = files
        self._processes = processes
        self._loaded: weakref.WeakValueDictionary[str, Renderer] = weakref.WeakValueDictionary()

    async def get(
        self, files: Mapping[str, str], settings: Settings, vision: Vision | None = None
    ) -> Renderer:
        """Return the renderer of ``files`` (name to digest). Raises any exception of the loader."""
        options = {
            name: value
            for name in ("eos_token", "pad_token", "bos_token")
            if (value := getattr(settings, name)) is not None
        }
        template = chat_template_text(settings)
        args = settings.chat_template_args
        tools, reasoning = settings.tool_parser, settings.reasoning_parser
        fim = settings.fim_layout
        key = repr((sorted(files.items()), options, template, args, tools, reasoning, fim, vision))
        renderer = self._loaded.get(key)
        if renderer is None:
            with self._files.assembled(files) as directory:
                renderer = await Renderer.load(
                    directory,
                    tokenizer_options=options,
                    chat_template=template,
                    template_args=args,
                    tool_parser=tools,
                    reasoning_parser=reasoning,
                    fim_layout=fim,
                    vision=vision,
                    processes=self._processes,
                )
            # The garbage collector scans all objects from time to time and blocks everything else:
            # the libraries that read tokenizers create so many objects that it takes a tenth of a
            # second.
            gc.freeze()
            self._loaded[key] = renderer
        return renderer
