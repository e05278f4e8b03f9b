// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"fmt"
	"testing"

	"github.com/weir-project/weir/service"
)

func TestTemplatesOption(t *testing.T) {
	for _, c := range []struct {
		option  Templates
		port    uint16
		by      Policy
		wanted  bool
		refused bool
	}{
		{"", 4739, "", true, false}, {TemplatesAuto, 53, BySource, false, false}, {TemplatesOn, 53, BySource, true, false},
		{TemplatesOff, 4739, BySource, false, false}, {TemplatesAuto, 4739, "packet", false, false}, {TemplatesOn, 4739, "packet", true, true},
	} {
		s := Service{Options: Options{Templates: c.option, By: c.by}}
		s.Listen = append(s.Listen, listen(t, fmt.Sprintf("udp :%d", c.port)))
		if got := s.WantsTemplates(c.port); got != c.wanted {
			t.Errorf("%+v: wanted %v", c, got)
		}
		if got := s.checkTemplates(); (got != "") != c.refused {
			t.Errorf("%+v: %s", c, got)
		}
	}
	s := Service{Options: Options{Templates: TemplatesOn}}
	s.Listen = append(s.Listen, listen(t, "tcp :4739"))
	if s.checkTemplates() == "" {
		t.Error("templates: true is accepted without a udp listen")
	}
}

func listen(t *testing.T, s string) service.Listen {
	t.Helper()
	l, err := service.ParseListen(s)
	if err != nil {
		t.Fatal(err)
	}
	return l
}
