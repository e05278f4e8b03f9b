// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/featuretest"
	"github.com/weir-project/weir/internal/units"
	"github.com/weir-project/weir/kernel/kerneltest"
)

// addSkeleton adds the skeleton to the list of features, for a test or a role started by a test.
func addSkeleton() (restore func()) {
	before := features
	features = append(slices.Clip(features), featuretest.Declare())
	return func() { features = before }
}

// skeletons is a host with the skeleton feature and a cgroup. The test process is in the cgroup.
type skeletons struct {
	world
	cgroup string // relative to the root
}

func newSkeletons(t *testing.T) skeletons {
	t.Cleanup(addSkeleton()) // before newWorld: its cleanup removes every feature in the list
	w := newWorld(t)
	root, err := units.CgroupRoot()
	if err != nil {
		t.Skip("need: kernel cgroup2:", err)
	}
	path := filepath.Join(root, fmt.Sprintf("weir-skeleton-%d", os.Getpid()))
	if err := os.Mkdir(path, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(path); err != nil {
			t.Error(err)
		}
	})
	return skeletons{w, "/" + filepath.Base(path)}
}

func (s skeletons) file(name string) string {
	path := filepath.Join(s.t.TempDir(), "weir.yaml")
	text := fmt.Sprintf("skeleton: [{name: %s, cgroup: %s}]\n", name, s.cgroup)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		s.t.Fatal(err)
	}
	return path
}

func (s skeletons) load(file string) *Config {
	s.t.Helper()
	c, err := LoadConfig(file)
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

// names returns the pinned items.
func (s skeletons) names() (out []string) {
	s.t.Helper()
	st, err := s.Reader("/nonexistent").Status(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	part, _ := Part[feature.SetState[featuretest.Item, featuretest.View]](st, featuretest.Name)
	for _, v := range part.Items {
		out = append(out, v.Name)
	}
	return out
}

// A feature unknown to the code of host is applied, shown, measured, explained, diagnosed, upgraded, restored and
// removed.
func TestSkeleton(t *testing.T) {
	s := newSkeletons(t)
	a, b := s.load(s.file("a")), s.load(s.file("b"))
	wantSteps(t, s.apply(a), "create skeleton a")
	wantSteps(t, s.apply(a))
	if got := s.names(); !slices.Equal(got, []string{"a"}) {
		t.Fatalf("status shows %q", got)
	}
	// Another version's program, at the same attachment.
	was := featuretest.Object
	featuretest.Object = []byte("skeleton 2")
	defer func() { featuretest.Object = was }()
	plan, err := s.UpgradePlan(t.Context())
	if err != nil || len(plan.Steps) != 1 || plan.Steps[0].String() != "upgrade skeleton a" {
		t.Errorf("upgrade: %v, %v", plan.Steps, err)
	}
	if err := s.Upgrade(t.Context(), func(Done) {}); err != nil {
		t.Fatal(err)
	}
	wantSteps(t, s.apply(a))
	wantSteps(t, s.apply(b), "create skeleton b", "remove skeleton a")
	served := s.serve()
	_, body := served.get("/metrics")
	checkMetrics(t, body, `weir_skeleton_packets_total{name="b"} \d+`, `weir_skeleton_up 1`)
	theirs, err := remote{served.socket, nil}.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if part, ok := theirs.Part(featuretest.Name).(*feature.SetState[featuretest.Item, featuretest.View]); !ok || len(part.Items) != 1 || part.Items[0].Name != "b" {
		t.Errorf("over the socket: %#v", theirs.Part(featuretest.Name))
	}
	socket, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 4739})
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	x, err := s.Explain(t.Context(), feature.Packet{Proto: "udp", From: netip.MustParseAddrPort("127.0.0.5:9"), To: netip.MustParseAddrPort("127.0.0.1:4739")})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(x.Steps, func(w feature.ExplainStep) bool { return w.Step == "skeleton b" }) {
		t.Errorf("explained without the skeleton: %+v", x)
	}
	if d := s.Doctor(t.Context()); !slices.ContainsFunc(d.Findings, func(f Finding) bool { return f.Feature == featuretest.Name && f.Level == "ok" }) {
		t.Errorf("doctor: %+v", d.Findings)
	}
	if err := s.Remove(t.Context(), featuretest.Name, false); err != nil {
		t.Fatal(err)
	}
	if got := s.names(); len(got) > 0 {
		t.Errorf("removed, and status shows %q", got)
	}
	for text, want := range map[string]string{
		"skeletn: []\n":                `unknown key "skeletn"; did you mean "skeleton"?`,
		"skeleton: [{nam: x}]\n":       `skeleton[0]: unknown key "nam"; did you mean "name"?`,
		"skeleton: [{name: [1, 2]}]\n": `skeleton[0].name: want text`,
	} {
		if _, err := ParseConfig("weir.yaml", []byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// After a kill at any step of a change, the next apply of the skeleton finishes it.
func TestSkeletonKilled(t *testing.T) {
	s := newSkeletons(t)
	first, file := s.load(s.file("a")), s.file("b")
	second := s.load(file)
	seen := map[string]bool{}
	for n := 0; ; n++ {
		s.apply(first)
		step := kerneltest.Killed(s.t, child("apply-skeleton", s.Root.Path(), file, n))
		if step == "" {
			break
		}
		seen[step] = true
		s.apply(second)
		if got := s.names(); !slices.Equal(got, []string{"b"}) {
			t.Errorf("killed at %s: status shows %q", step, got)
		}
		if damage, _ := s.faults(); len(damage) > 0 {
			t.Errorf("killed at %s: faults %q", step, damage)
		}
		wantSteps(t, s.apply(second))
	}
	for _, step := range []string{"publish:staged", "publish:renamed", "skeleton:attached", "remove:retired"} {
		if !seen[step] {
			t.Errorf("was never killed at %s, but at %v", step, seen)
		}
	}
}

// The state of the skeleton saved by apply --confirm is restored.
func TestSkeletonRestored(t *testing.T) {
	s := newSkeletons(t)
	s.apply(s.load(s.file("a")))
	f := featuretest.New()
	saved, err := f.Save(t.Context(), s.Root)
	if err != nil {
		t.Fatal(err)
	}
	s.apply(s.load(s.file("b")))
	_, err = featuretest.Restore(t.Context(), s.Root, f, saved)
	if got := s.names(); err != nil || !slices.Equal(got, []string{"a"}) {
		t.Errorf("restored: %q, %v", got, err)
	}
}

// playApplySkeleton is playApply with the skeleton.
func playApplySkeleton(f []string) error {
	addSkeleton()
	return playApply(f)
}
