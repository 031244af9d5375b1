#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What jinja2 makes of the templates of families/, of twenty conversations, and of snippets.txt.

Set up as model files' templates are meant to run: sandboxed, trim_blocks, lstrip_blocks, loop controls,
generation blocks, tojson without HTML escapes. Writes golden.jsonl (or the file named), one line a
rendering: {"template" | "snippet", "vars" | "talk", "text" | "error": true}. With --print it says
what jinja2 complains of instead.

Run it by hand where jinja2 is installed, when a template, conversation or snippet changes; the suite reads its file.
"""
import datetime
import json
import os
import sys

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

HERE = os.path.dirname(os.path.abspath(__file__))
NOW = datetime.datetime(2026, 3, 5, 14, 7, 9)


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_same")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _same(self, caller):
        return caller()


def refuse(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = lambda f: NOW.strftime(f)
    return env


def render(env, text, values):
    try:
        return {"text": env.from_string(text).render(**values)}
    except Exception as e:  # whatever python says: the interpreter must say no, too
        if "--print" in sys.argv:
            print(repr(text[:70]), "->", type(e).__name__, e)
        return {"error": True}


def snippets():
    """Parts between lines of ---; a first line "vars: {...}" adds to what all see."""
    with open(os.path.join(HERE, "snippets.txt"), encoding="utf-8", newline="") as f:
        for part in f.read().split("\n---\n"):
            extra = {}
            if part.startswith("vars: "):
                line, part = part.split("\n", 1)
                extra = json.loads(line[6:])
            yield part, extra


def main():
    env = environment()
    with open(os.path.join(HERE, "conversations.json"), encoding="utf-8") as f:
        given = json.load(f)
    args = [a for a in sys.argv[1:] if a != "--print"]
    out = open(args[0] if args else os.path.join(HERE, "golden.jsonl"), "w", encoding="utf-8")

    def put(line):
        out.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")

    for name in sorted(os.listdir(os.path.join(HERE, "families"))):
        with open(os.path.join(HERE, "families", name), encoding="utf-8", newline="") as f:
            text = f.read()
        for i, talk in enumerate(given["talks"]):
            values = {"tools": None, "documents": None, **given["common"], **talk}
            put({"template": name, "talk": i, **render(env, text, values)})
    for text, extra in snippets():
        line = {"snippet": text, **render(env, text, {**given["snippets"], **extra})}
        if extra:
            line["vars"] = extra
        put(line)
    out.close()


main()
