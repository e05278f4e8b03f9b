// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"strings"
	"testing"
)

// doctor says whom an agent lacks; an agent that has all is no finding.
func TestExamineAgent(t *testing.T) {
	for _, c := range []struct {
		s    Status
		says []string
	}{
		{Status{LB: true, Keeper: true}, nil},
		{Status{LB: true, Keeper: true, LBRejects: "number 1 is backend h1's"}, []string{"refuses it, and gives it no new flows: number 1 is backend h1's"}},
		{Status{Keeper: true}, []string{"not connected with a load balancer"}},
		{Status{}, []string{"not connected with a load balancer", "the keeper does not answer"}},
	} {
		got := examineAgent("backend b", c.s)
		if len(got) != len(c.says) {
			t.Errorf("%+v: %+v, want %q", c.s, got, c.says)
			continue
		}
		for i, f := range got {
			if !strings.Contains(f.Text, c.says[i]) || f.Remedy == "" || f.Object != "backend b" {
				t.Errorf("%+v: %+v, want %q", c.s, f, c.says[i])
			}
		}
	}
}
