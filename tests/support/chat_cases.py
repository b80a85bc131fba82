"""Chat templates that use what real ones use."""

SYNTHETIC: dict[str, str] = {
    "loop controls": """
{%- for m in messages %}
    {% if m.role == 'system' %}{% continue %}{% endif %}
    {% if loop.index > 3 %}{% break %}{% endif %}
{{ loop.index }} {{ m.role }}: {{ m.content }}
{% endfor %}
""",
    "generation tags": """{% for m in messages %}{% set x = 1 %}{% if m.role == 'assistant' %}
{% generation %}{% set x = 2 %}{{ m.content ~ x }}{{ eos_token }}{% endgeneration %}
{% endif %}{{ x }}{% endfor %}""",
    "json": """{{ messages | tojson }}
{{ messages | tojson(indent=2) }}
{{ tools | tojson(sort_keys=true, separators=(',', ':')) }}
{{ messages[0].content | tojson(ensure_ascii=true) }}""",
    "text": """{% for m in messages %}
{%- set c = m.content | default('', true) %}
{{ c | trim }}|{{ c | upper }}|{{ c | lower }}|{{ c | title }}|{{ c | capitalize }}|{{ c | length }}
{{ c.split(' ') | join('-') }}|{{ c.strip('H ') }}|{{ c[1:5] }}|{{ c[::-1] }}|{{ c | replace('l', 'L') }}
{{ c.startswith('  H') }}|{{ 'there' in c }}|{{ c.find('e') }}|{{ c.rsplit('e', 1)[-1] }}|{{ '%s!' % c }}
{{ c | first }}|{{ c | last }}|{{ c | list | length }}|{{ c == messages[0].content }}|{{ (c ~ 'x')[-2:] }}
{{ c | indent(4) }}|{{ c | wordcount }}|{{ c is string }}|{{ c is mapping }}|{{ c is none }}|{{ c.title() }}
{% endfor %}""",
    "values": """{{ messages }}{{ messages[0] }}{{ tools }}{{ messages | map(attribute='content') | list }}
{% for m in messages %}{{ 'a<b>' | safe + m.content | default('', true) }}{{ m.content ~ '<' }}{{ (m.content,) }}
{{- m.content | e }}{{ m.content | safe }}{{ m.content | forceescape }}{{ m.content | default('') | tojson | safe }}
{% endfor %}{{ messages[0].content + '<i>' | safe }}{{ '<b>%s' | safe % messages[0].content }}""",
    "state": """{% set ns = namespace(n=0, seen=[]) %}{% macro item(m, i=0) %}[{{ i }}:{{ m.role }}]{% endmacro %}
{% for m in messages if m.role != 'tool' %}{% set ns.n = ns.n + 1 %}{{ item(m, i=ns.n) }}{% endfor %}
{% set block %}{{ messages[0].content }} {{ strftime_now('%d %b %Y %H:%M') }}{% endset %}
{{ block | trim }} {{ dict(a=1)['a'] }} {{ messages | map(attribute='role') | unique | join(', ') }}
{{ tools | map(attribute='function.name') | sort | join('/') if tools else 'no tools' }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ bos_token }} {{ undefined_name }}
{% for k, v in messages[0] | dictsort %}{{ k }}={{ v }};{% endfor %}
{% for k, v in messages[0].items() %}{{ k }}{% endfor %}
""",
    "white space": """
  {% if true %}
    kept
  {% endif %}
  {#- a comment -#}
\t{%- for m in messages -%}
   {{ m.role }}
{% endfor %}

end
""",
}
"""Templates by the name of what they use."""
