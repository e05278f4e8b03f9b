// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
)

// Long work shows its progress on a terminal, and clears it before the result. A pipe gets no byte of it. The input
// stops until the progress is seen.
func TestProgress(t *testing.T) {
	for line, x := range map[string]struct{ input, want string }{
		"reroute plan -f -":                 {"{nodes: [{name: a}, {name: b}], links: [{from: a, to: b, metric: 1}]}\n", "2 nodes, 1 link"},
		"filter test udp -r -":              {"\xd4\xc3\xb2\xa1\x02\x00\x04\x00" + strings.Repeat("\x00", 8) + "\xff\xff\x00\x00\x01\x00\x00\x00", "0 packets"},
		"--root ROOT bind load --dry-run -": {`{"bindings": [{"label": "www", "prefix": "192.0.2.1/32", "port": 80, "protocol": "tcp"}]}`, "1 added"},
	} {
		line = strings.ReplaceAll(line, "ROOT", nstest.BPFFS+"/progress")
		for _, term := range []string{"xterm", "dumb", ""} {
			c := command(strings.Fields(line)...)
			var out, errs bytes.Buffer
			c.Stdout, c.Stderr = &out, &errs
			p := nstest.NewPTY(t, 80)
			if term != "" {
				c.Stderr = p.File
				c.Env = append(c.Env, "TERM="+term)
			}
			in, err := c.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			if term == "xterm" {
				p.Wait(`\rreading standard input… \d+ s\x1b\[K\r`)
			}
			io.WriteString(in, x.input)
			in.Close()
			if err := c.Wait(); err != nil || !strings.Contains(out.String(), x.want) {
				t.Errorf("%s: %v: %s%s%s", line, err, out.String(), errs.String(), p.Text())
			}
			if term == "xterm" {
				p.Wait(`\r\x1b\[K\r$`)
			} else if text := errs.String() + p.Text(); strings.ContainsAny(text, "\r\x1b") || strings.Contains(text, "reading") {
				t.Errorf("%s, TERM=%q: %q", line, term, text)
			}
		}
	}
}
