"""Chat templates of several families, some in a short form."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + "
    "'<|end_header_id|>\n\n' }}"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% "
    "endif %}"
)
# A short form of Qwen3's template. It drops reasoning before the last user message, gives the last
# answer a thought in any case, lists the tools, and writes their results as a user's messages.
QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\n' }}{%- for tool in tools %}{{ tool.function | tojson }}{%- endfor %}{{ '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}
            {{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}
        {%- endif %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>' + m.content + '</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}
"""
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<User>' + m.content }}{% else %}"
    "{{ '<Assistant>' + m.content.split('</think>')[-1] + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<Assistant><think>\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' "
    "[/INST]' }}"
    "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{{ '<|assistant|>\n' if add_generation_prompt else '<|endoftext|>' }}"
)
# A short form of Gemma 3's template: the system message joins the first question, and the assistant
# is "model".
GEMMA3 = """
{{- bos_token }}
{%- set before = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}
{%- for m in (messages[1:] if before else messages) %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (before if loop.first else '') }}
    {{- m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{%- endif %}
"""
# A short form of SmolLM3's: a system message of its own with the day, and marks that have the
# header inside.
SMOLLM3 = """
{%- macro turn(role, content) %}{{ '<|im_start|>' + role + '\n' + content + '<|im_end|>\n' }}{% endmacro %}
{%- set ns = namespace(system='None') %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{%- set ns.system = m.content %}{%- break %}{%- endif %}
{%- endfor %}
{{- turn('system', strftime_now('%d %B %Y') + '\n' + ns.system) }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{%- continue %}{%- endif %}
    {%- if m.role == 'user' %}{{ turn('user', m.content) }}
    {%- else %}{% generation %}{{ turn('assistant', m.content.lstrip('\n')) }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}
"""
# A short form of OLMo 3's Think: the last turn ends by another token, and answers begin with
# "<think>".
OLMO3 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{{ '<|endoftext|>' if loop.last and m.role == 'assistant' else '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"
)
# A short form of Ministral 3's: no header before an answer to a tool's result, and reasoning in
# parts of the content.
MINISTRAL3 = """
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
    {%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {%- for part in ([{'type': 'text', 'text': m.content}] if m.content is string else m.content) %}
            {{- '[THINK]' + part.thinking + '[/THINK]' if part.type == 'thinking' else part.text }}
        {%- endfor %}
        {%- for call in m.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + (call.function.arguments | tojson) }}
        {%- endfor %}
        {{- '</s>' }}
    {%- endif %}
{%- endfor %}
"""
# A short form of Qwen3.5's: it needs a question, answers begin with "<think>", and earlier turns
# lose theirs.
QWEN35 = """
{%- macro text(content) %}{% for part in [content] %}{{ part | trim }}{% endfor %}{% endmacro %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages[::-1] %}
    {%- if m.role == 'user' %}{%- set ns.last = messages | length - loop.index %}{%- break %}{%- endif %}
{%- endfor %}
{%- if ns.last < 0 %}{{ raise_exception('no question') }}{%- endif %}
{%- for m in messages %}
    {%- for later in messages[loop.index:] %}{% if later.role == 'none' %}{{ later.content }}{% endif %}{% endfor %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' and loop.index0 > ns.last %}
        {{- '<think>\n' + m.reasoning_content | default('') + '\n</think>\n\n' }}
    {%- endif %}
    {{- text(m.content) + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{%- endif %}
"""
# A short form of Nemotron 3's: answers are asked for with "<think>\n", and one without a thought
# begins otherwise.
NEMOTRON3 = """
{%- for m in messages %}
    {%- set content = m.content or '' %}
    {%- if m.reasoning_content %}{% set content = '<think>\n' + m.reasoning_content + '\n</think>\n' + content %}
    {%- elif m.role == 'assistant' and '<think>' not in content and '</think>' not in content %}
        {%- set content = '<think></think>' + content %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\n' + content | trim }}
    {%- for call in m.tool_calls or [] %}
        {{- '\n<tool_call>' + call.function.name + '\n' }}
        {%- for name, value in call.function.arguments | items %}{{ name ~ '=' ~ value ~ '\n' }}{% endfor %}
        {{- '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' + ('<think>\n' if enable_thinking | default(true) else '<think></think>') }}
{%- endif %}
"""
# A short form of DeepSeek R1's: calls beside a content of none alone, with arguments as a text.
# What stands before an answer to results is no part of the prompt's header, and one call has no
# end.
DEEPSEEK_R1 = """
{{- bos_token }}{% set ns = namespace(results=false) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<|user|>' + m.content }}{% endif %}
    {%- if m.role == 'assistant' and m.content is none %}
        {%- for call in m.tool_calls %}
            {{- '<|assistant|>' if loop.first else '\n' }}
            {{- '<call>' + call.function.name + ' ' + call.function.arguments + '[/CALL]' }}
            {{- '</s>' if loop.index > 1 }}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}
        {{- ('[/TOOL_RESULTS]' if ns.results else '<|assistant|>') + m.content.split('</think>')[-1] + '</s>' }}
        {%- set ns.results = false %}
    {%- elif m.role == 'tool' %}
        {{- '' if ns.results else '[TOOL_RESULTS]' }}{{ m.content }}{% set ns.results = true %}
    {%- endif %}
{%- endfor %}
{%- if ns.results %}{{ '[/TOOL_RESULTS]' }}{% elif add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}
"""
