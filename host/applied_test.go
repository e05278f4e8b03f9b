// SPDX-License-Identifier: Apache-2.0

package host

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature"
)

// The metrics show the file in force on each host of a fleet, and the outcome of the last apply.
func TestAppliedMetrics(t *testing.T) {
	w := newWorld(t)
	pid, _ := daemon(t, "0.0.0.0:4739")
	s := w.serve()
	page := func() string { _, body := s.get("/metrics"); return body }
	if body := page(); strings.Contains(body, "weir_config_") {
		t.Errorf("nothing was applied, and there is:\n%s", body)
	}
	c := w.config(twoServices, pid)
	w.apply(c)
	hash := fmt.Sprintf("%x", sha256.Sum256(fmt.Appendf(nil, twoServices, pid)))
	inForce := `weir_config_info{hash="` + hash + `"} 1`
	checkMetrics(t, page(), inForce, `weir_config_last_apply_timestamp_seconds [0-9.e+]+`, `weir_config_last_apply_success 1`)
	outage := w.config(strings.Replace(twoServices, "tcp 0.0.0.0:4739", "tcp 0.0.0.0:4739, udp 0.0.0.0:4740", 1), pid)
	if err := w.Apply(t.Context(), outage, func(Done) {}); !errors.Is(err, feature.ErrOutage) {
		t.Fatal(err)
	}
	checkMetrics(t, page(), inForce, `weir_config_last_apply_success 0`)
	if err := w.Remove(t.Context(), "", true); err != nil {
		t.Fatal(err)
	}
	if body := page(); strings.Contains(body, "weir_config_") {
		t.Errorf("all is removed, and there is:\n%s", body)
	}
}
