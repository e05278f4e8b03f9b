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
