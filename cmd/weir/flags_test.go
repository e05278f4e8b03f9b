// SPDX-License-Identifier: Apache-2.0

package main

import (
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// ofGo matches error messages of Go's parsers.
var ofGo = regexp.MustCompile(`strconv|ParseAddr|ParsePrefix|ParseInt|time: |invalid syntax|unable to parse|bind: invalid argument`)

// No flag of any command prints an error message of Go's parsers.
func TestFlagErrors(t *testing.T) {
	found := 0
	for _, c := range allCommands(newCommand()) {
		if c.DisableFlagParsing {
			continue
		}
		c.InheritedFlags() // merge the inherited flags
		c.Flags().VisitAll(func(f *pflag.Flag) {
			for _, value := range []string{"nonsense", "5", "99999999999999999999"} {
				err := c.ParseFlags([]string{"--" + f.Name + "=" + value})
				if err == nil {
					continue
				}
				found++
				if err := c.FlagErrorFunc()(c, err); ofGo.MatchString(err.Error()) || !strings.Contains(err.Error(), "--"+f.Name) {
					t.Errorf("%s --%s=%s: %v", c.CommandPath(), f.Name, value, err)
				}
			}
		})
	}
	if found < 50 {
		t.Errorf("only %d errors were found", found)
	}
}

// Wrong typing exits with exitUsage, and the message names the remedy.
func TestWrongUsage(t *testing.T) {
	for _, c := range []struct{ line, want string }{
		{"explain 192.0.2.1 192.0.2.2", "want weir explain {udp | tcp} FROM TO, got 2 arguments; see weir explain --help"},
		{"explain icmp 192.0.2.1 192.0.2.2", `protocol "icmp": want udp or tcp`},
		{"explain udp 192.0.2.1 192.0.2.2:1", "want an address and a port"},
		{"apply --confrim 5m", "unknown flag: --confrim; did you mean --confirm?"},
		{"apply -x", "unknown shorthand flag: 'x'"},
		{"remove foo", `no feature "foo": want one of steer`},
		{"serve --listen 127.0.0.1:99999", "--listen 127.0.0.1:99999: "},
		{"serve --listen 9743", "want an address and a port, like 127.0.0.1:9743"},
		{"status now", "weir status takes no arguments"},
	} {
		if _, errs, status := weir(t, strings.Fields(c.line)...); status != exitUsage || !strings.Contains(errs, c.want) {
			t.Errorf("weir %s: status %d, %q; want %q", c.line, status, errs, c.want)
		}
	}
	if out, _, status := weir(t, "--version"); status != 0 || !strings.HasPrefix(out, "weir ") || !strings.Contains(out, "pins: layout") {
		t.Errorf("weir --version: status %d, %q", status, out)
	}
}
