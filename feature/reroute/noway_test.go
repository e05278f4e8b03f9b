// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// Two links that repair each other may both be down: state, doctor, metric and log report dropped packets.
func TestNoWayLeft(t *testing.T) {
	w := newWorld(t)
	w.apply(fmt.Sprintf(`
reroute:
  - {name: there, netns: %[1]s, interface: r12, repairs: [{segments: [fc00:3::e, fc00:2::d6], interface: r13, via: "fd00:13::3"}]}
  - {name: around, netns: %[1]s, interface: r13, repairs: [{interface: r12, via: "fd00:12::2"}]}
`, w.name[w.r1]))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	var said nstest.Log
	go func() { ended <- Feature{}.Run(ctx, w.root, slog.New(slog.NewTextHandler(&said, nil))) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	w.eventually("the links are followed", func() bool { return said.Has("links are followed") })
	drained := func(path string, on bool) {
		t.Helper()
		w.locked(func(l *kernel.WriteLock) error {
			if on {
				return Drain(l, path)
			}
			return Undrain(l, path)
		})
	}
	find := func(path string) (p protect.PathState) {
		t.Helper()
		for _, p = range w.state().Paths {
			if p.Name == path {
				return p
			}
		}
		t.Fatalf("no path %s", path)
		return p
	}
	drained("there", true)
	if p := find("there"); !p.Down || len(p.Dropped) != 0 || len(droppedPackets(p)) != 0 {
		t.Errorf("with a way left: %+v", p)
	}
	drained("around", true)
	for path, want := range map[string]string{"there": "IPv6", "around": "IPv4, IPv6"} {
		p := find(path)
		if got := strings.Join(p.Dropped, ", "); got != want {
			t.Errorf("path %s drops %q, want %q", path, got, want)
		}
		found := droppedPackets(p)
		if len(found) != 1 || !strings.Contains(found[0].Text, "no way left: the link (drained)") || !strings.Contains(found[0].Remedy, "weir reroute undrain") {
			t.Errorf("doctor says %+v", found)
		}
		w.eventually("the log tells it", func() bool {
			return said.Has(`level=WARN msg="packets dropped, no way left`, "path="+path+" ", want)
		})
	}
	var metric []string
	path(find("there"), func(d *prometheus.Desc, _ prometheus.ValueType, v float64, labels ...string) {
		if d == dropsDesc {
			metric = append(metric, fmt.Sprint(labels[0], labels[3], v))
		}
	})
	if want := []string{"thereIPv40", "thereIPv61"}; !slices.Equal(metric, want) {
		t.Errorf("metric %q, want %q", metric, want)
	}
	w.in(w.s, func() error {
		c, err := net.Dial("udp", "[fd00:d::2]:9")
		if err == nil {
			_, err = c.Write([]byte("lost"))
			c.Close()
		}
		return err
	})
	w.eventually("packets are counted as dropped", func() bool { return find("there").Counts.Stuck > 0 })
	drained("around", false)
	if p := find("there"); len(p.Dropped) != 0 || p.Remedy != "" {
		t.Errorf("with a way again: %+v", p)
	}
	w.eventually("the log tells it", func() bool { return said.Has(`level=INFO msg="packets have a way again" path=there`) })
}
