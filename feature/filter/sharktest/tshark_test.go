// SPDX-License-Identifier: Apache-2.0

package sharktest

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
)

// tsharkFlags make tshark dissect packets like weir: each on its own, from its first byte to its
// last.
var tsharkFlags = []string{"-n",
	"-o", "ip.defragment:FALSE", "-o", "ipv6.defragment:FALSE", // no reassembly of fragments
	"-o", "tcp.desegment_tcp_streams:FALSE", // no reassembly of segments
	"-d", "tcp.port==9998,data", "-d", "udp.port==9999,data", // no heuristics for payloads
}

// needTshark skips a test without tshark, or without the right to run programs in the kernel. After
// bootstrap installed tshark, its absence is a failure.
func needTshark(t testing.TB) {
	t.Helper()
	nstest.NeedRoot(t)
	if _, err := exec.LookPath("tshark"); err != nil {
		t.Skip("need: tool tshark (Debian package tshark)")
	}
}

func tshark(t testing.TB, env []string, args ...string) string {
	t.Helper()
	c := exec.Command("tshark", append(tsharkFlags[:len(tsharkFlags):len(tsharkFlags)], args...)...)
	home := t.TempDir() // ignore preferences of the current user
	c.Env = append(append(os.Environ(), "HOME="+home, "XDG_CONFIG_HOME="+home, "WIRESHARK_CONFIG_DIR="+home), env...)
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil && !strings.Contains(stderr.String(), "cut short") {
		t.Fatalf("%s: %v\n%s", c, err, stderr.String())
	}
	return string(out)
}

// frames is the set of matching packets, numbered from 1.
type frames map[int]bool

// sharks returns the packets of a capture matched by each display filter.
func sharks(t testing.TB, capture string, filters []string) []frames {
	t.Helper()
	list := filepath.Join(t.TempDir(), "filters")
	check(t, os.WriteFile(list, []byte(strings.Join(filters, "\n")+"\n"), 0o600))
	out := tshark(t, []string{"WEIR_DISPLAY_FILTERS=" + list}, "-q", "-X", "lua_script:testdata/taps.lua", "-r", capture)
	matched := make([]frames, len(filters))
	for i := range matched {
		matched[i] = frames{}
	}
	for line := range strings.Lines(out) {
		verb, rest, _ := strings.Cut(strings.TrimSpace(line), "\t")
		var filter, frame int
		_, err := fmt.Sscan(rest, &filter, &frame)
		switch {
		case verb == "match" && err == nil && filter <= len(filters):
			matched[filter-1][frame] = true
		case verb == "refused" && filter > 0:
			t.Errorf("tshark rejects %s: %s", filters[filter-1], rest)
		default:
			t.Fatalf("tshark prints %q", line)
		}
	}
	return matched
}

// shark runs tshark with one display filter, like a user.
func shark(t testing.TB, capture, filter string) frames {
	t.Helper()
	matched := frames{}
	for _, n := range strings.Fields(tshark(t, nil, "-r", capture, "-Y", filter, "-T", "fields", "-e", "frame.number")) {
		var i int
		_, err := fmt.Sscan(n, &i)
		check(t, err)
		matched[i] = true
	}
	return matched
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
