"""Small chat templates that write tools and calls in the ways that models were trained on."""

HERMES = """
{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '</tools> answer in <tool_call></tool_call>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start|>' + message.role + '\\n' }}
    {%- if message.content %}
        {{- message.content }}
    {%- endif %}
    {%- for call in message.tool_calls %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
{%- endif %}
"""
MISTRAL = """
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.first %}
            {{- '[TOOLS] [' }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", ' }}
                {%- for key, value in tool.items() if key != 'return' %}
                    {{- '"' + key + '": ' + (value | tojson) + ', ' }}
                {%- endfor %}
                {{- '}' }}
            {%- endfor %}
            {{- ']' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}
                {{- raise_exception('ids have 9 characters') }}
            {%- endif %}
            {{- (call.function | tojson) + call.id + ', ' }}
        {%- endfor %}
        {{- ']' }}
    {%- elif message.role == 'tool' %}
        {{- message.tool_call_id + message.content | string }}
    {%- endif %}
{%- endfor %}
"""
LLAMA = """
{%- for tool in tools or [] %}
    {{- tool | tojson(indent=4) }}
{%- endfor %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|python_tag|>' }}
    {%- else %}
        {{- message.role + ': ' + message.content | trim }}
    {%- endif %}
{%- endfor %}
"""
