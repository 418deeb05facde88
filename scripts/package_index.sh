# Sourced by scripts that call uv: tells it, which reads none of pip's settings, where pip gets packages. Other indexes
# than the main one are left out: all that the lock names is on the main one. Arguments: the command that runs pip.
follow_pip_settings() {
    local index=${PIP_INDEX_URL:-} cert=${PIP_CERT:-}
    index=${index:-$("$@" config get global.index-url 2>/dev/null || true)}
    cert=${cert:-$("$@" config get global.cert 2>/dev/null || true)}
    [[ -z $index || -n ${UV_DEFAULT_INDEX:-} ]] || export UV_DEFAULT_INDEX=$index
    [[ -z $cert || -n ${SSL_CERT_FILE:-} ]] || export SSL_CERT_FILE=$cert
    export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
}
