// SPDX-License-Identifier: Apache-2.0

package handoffcompare

import (
	"net/netip"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/lab"
)

func TestMain(m *testing.M) {
	lab.Enter()
	nstest.Main(m)
}

func newExperiment(t *testing.T, servers int) *experiment {
	t.Helper()
	nstest.NeedRoot(t)
	if err := kernel.Require(lb.Needs); err != nil {
		t.Skip("need: kernel", err)
	}
	weir := filepath.Join(t.TempDir(), "weir")
	if out, err := exec.Command("go", "build", "-o", weir, "github.com/weir-project/weir/cmd/weir").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Setenv("WEIR", weir)
	e, err := lab.NewEnv(lab.Smoke, 1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		e.Close()
		if left := e.Leftovers(); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	})
	// The load balancer hashes ports: after one round one of three servers may have no connection.
	p := plan{servers: []int{servers}, each: 30 * time.Second, rounds: 6, ping: 20 * time.Millisecond, bulk: 20 * time.Millisecond}
	return &experiment{plan: p, env: e, result: lab.NewResult("handoff-compare", lab.Smoke, 1), found: map[cell]*finding{}}
}

func judge(x *experiment) map[string]bool {
	x.report()
	x.claims()
	ok := map[string]bool{}
	for _, c := range x.result.Claims {
		ok[c.Metric] = c.OK
	}
	return ok
}

func TestMeasure(t *testing.T) {
	x := newExperiment(t, 3)
	if err := x.measure(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(x.result.Skipped) > 0 {
		t.Skip("need: tool haproxy")
	}
	for metric, ok := range judge(x) {
		if !ok {
			t.Errorf("%s is %v", metric, x.result.Metrics[metric])
		}
	}
	for _, metric := range []string{"fe_latency_ratio_haproxy", "fe_throughput_ratio_haproxy", "fe_throughput_ratio_direct", "us_p999_weir_3"} {
		if x.result.Metrics[metric] <= 0 {
			t.Errorf("%s was not measured", metric)
		}
	}
}

// The test detects answers of a server outside all ways, and a server without requests.
func TestFindings(t *testing.T) {
	x := newExperiment(t, 2)
	var err error
	if x.world, err = newWorld(x.env, 2); err != nil {
		t.Fatal(err)
	}
	astray := way{directWay, func(int) netip.AddrPort { return netip.AddrPortFrom(serverAddr(without, 1), servicePort) }}
	if err := x.turn(astray, 1); err != nil {
		t.Fatal(err)
	}
	ok := judge(x)
	for _, metric := range []string{"wrong_answers", "idle_servers"} {
		if ok[metric] {
			t.Errorf("%s is %v, and accepted", metric, x.result.Metrics[metric])
		}
	}
}
