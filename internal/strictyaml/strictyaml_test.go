// SPDX-License-Identifier: Apache-2.0

package strictyaml_test

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/strictyaml"
)

var update = flag.Bool("update", false, "rewrite the golden files")

type host struct {
	strictyaml.Pos `yaml:"-"`
	Services       map[string]service `yaml:"services"`
	Runq           *runq              `yaml:"runq"`
}

type service struct {
	common
	Steer *steer `yaml:"steer"`
}

// common is shared by embedding.
type common struct {
	At      strictyaml.Pos
	Listen  []listen       `yaml:"listen"`
	Prefix  netip.Prefix   `yaml:"prefix"`
	Peer    netip.Addr     `yaml:"peer"`
	Targets []netip.Prefix `yaml:"targets"`
	Extra   extra          `yaml:",inline"`
	//lint:ignore U1000 must not become a key
	hidden int
}

type extra struct {
	Netns string `yaml:"netns"`
}

type steer struct {
	strictyaml.Pos `yaml:"-"`
	By             string   `yaml:"by"`
	Slots          int      `yaml:"slots"`
	OnEmpty        string   `yaml:"on_empty"`
	Seed           *uint32  `yaml:"seed"`
	Weights        []uint8  `yaml:"weights"`
	Share          float64  `yaml:"share"`
	Members        []member `yaml:"members"`
}

type member struct {
	strictyaml.Pos `yaml:"-"`
	Slot           int `yaml:"slot"`
	Unit           string
	Skipped        string `yaml:"-"`
}

type runq struct {
	Every   time.Duration `yaml:"every"`
	Enabled bool          `yaml:"enabled"`
	Limit   rate          `yaml:"limit"`
}

type listen struct{ Proto, Addr string }

var errListen = errors.New(`want PROTOCOL ADDRESS:PORT, like "udp 0.0.0.0:4739"`)

func (l *listen) UnmarshalText(b []byte) error {
	proto, addr, ok := strings.Cut(string(b), " ")
	if !ok {
		return errListen
	}
	*l = listen{proto, addr}
	return nil
}

// rate is 20kpps, or {packets: 5, bytes: 7}.
type rate struct {
	Text           string
	Packets, Bytes int
	Line           int
}

func (r *rate) UnmarshalNode(n *yaml.Node, d *strictyaml.Decoder) error {
	r.Line = d.Pos(n).Line
	switch n.Kind {
	case yaml.ScalarNode:
		if !strings.HasSuffix(n.Value, "pps") {
			return d.Errorf(n, n.Value+"pps", "rate %q has no unit", n.Value)
		}
		r.Text = n.Value
		return nil
	case yaml.SequenceNode:
		return fmt.Errorf("a rate is no list")
	}
	var m struct{ Packets, Bytes int }
	err := d.Decode(n, &m)
	r.Packets, r.Bytes = m.Packets, m.Bytes
	return err
}

func TestDecode(t *testing.T) {
	const in = `# a host
services:
  telemetry:
    listen: [udp 0.0.0.0:4739, tcp 0.0.0.0:1790]
    prefix: 2001:db8::/32
    peer: 192.0.2.1
    targets:
      - 192.0.2.0/24
    netns: 1
    steer: &steer
      by: source
      slots: 0x10
      seed: 4_294_967_295
      weights: [0, 255]
      share: 1e-3
      members:
        - {slot: 0, unit: a.service}
        - slot: 1
          unit: "0123"
  dns: {steer: *steer}
runq:
  every: 1m30s
  enabled: true
  limit: 20kpps
`
	var h host
	if err := strictyaml.Decode("weir.yaml", []byte(in), &h); err != nil {
		t.Fatal(err)
	}
	at := func(line, column int) strictyaml.Pos {
		return strictyaml.Pos{File: "weir.yaml", Line: line, Column: column}
	}
	seed := uint32(math.MaxUint32)
	st := &steer{
		Pos: at(11, 7), By: "source", Slots: 16, Seed: &seed, Weights: []uint8{0, 255}, Share: 0.001,
		Members: []member{{Pos: at(17, 11), Slot: 0, Unit: "a.service"}, {Pos: at(18, 11), Slot: 1, Unit: "0123"}},
	}
	want := host{
		Pos: at(2, 1),
		Services: map[string]service{
			"telemetry": {
				common: common{
					At: at(4, 5), Listen: []listen{{"udp", "0.0.0.0:4739"}, {"tcp", "0.0.0.0:1790"}},
					Prefix: netip.MustParsePrefix("2001:db8::/32"), Peer: netip.MustParseAddr("192.0.2.1"),
					Targets: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}, Extra: extra{Netns: "1"},
				},
				Steer: st,
			},
			"dns": {common: common{At: at(20, 8)}, Steer: st},
		},
		Runq: &runq{Every: 90 * time.Second, Enabled: true, Limit: rate{Text: "20kpps", Line: 24}},
	}
	bare := func(p *strictyaml.Pos) { *p = p.At("") } // without the positions of keys
	bare(&h.Pos)
	for name, s := range h.Services {
		bare(&s.At)
		bare(&s.Steer.Pos)
		for i := range s.Steer.Members {
			bare(&s.Steer.Members[i].Pos)
		}
		h.Services[name] = s
	}
	if !reflect.DeepEqual(h, want) {
		t.Errorf("got  %+v\nwant %+v", h, want)
	}
}

// TestDefaults checks that values absent in the file stay, and others are replaced.
func TestDefaults(t *testing.T) {
	s := steer{By: "source", Slots: 4, Weights: []uint8{1, 2, 3}}
	if err := strictyaml.Decode("f", []byte("slots: 8\nweights: [9]\n"), &s); err != nil {
		t.Fatal(err)
	}
	if s.By != "source" || s.Slots != 8 || !reflect.DeepEqual(s.Weights, []uint8{9}) {
		t.Errorf("got %+v", s)
	}
	m := map[string]int{"a": 1}
	if err := strictyaml.Decode("f", []byte("{b: 2}"), &m); err != nil || m["a"] != 1 || m["b"] != 2 {
		t.Errorf("got %v, %v", m, err)
	}
}

// TestGoldenErrors decodes every testdata/*.yaml as a host and compares its errors with *.golden.
func TestGoldenErrors(t *testing.T) {
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal("no test data", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			err = strictyaml.Decode(filepath.Base(file), data, &host{})
			if err == nil {
				t.Fatal("no error")
			}
			golden := strings.TrimSuffix(file, ".yaml") + ".golden"
			if *update {
				if err := os.WriteFile(golden, []byte(err.Error()+"\n"), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, e := os.ReadFile(golden)
			if e != nil {
				t.Fatal(e)
			}
			if got := err.Error() + "\n"; got != string(want) {
				t.Errorf("got:\n%swant:\n%s", got, want)
			}
		})
	}
}

// TestErrors checks the whole message for one mistake in a small document.
func TestErrors(t *testing.T) {
	const mapping = "a mapping (key: value)"
	for _, c := range []struct{ in, want string }{
		{"", "f:1:1: the file is empty"},
		{"# only a comment\n", "f:1:1: the file is empty"},
		{"---\n", "f:2:1: the file is empty"},
		{"null", "f:1:1: the file is empty"},
		{"runq: {}\n---\nrunq: {}\n", "f:2:1: a second document begins here; a file holds one, remove the line ---"},
		{"[1]", "f:1:1: want " + mapping + ", got a list"},
		{"x", `f:1:1: want ` + mapping + `, got "x"`},
		{"\xff", "f:1:1: not UTF-8 text (byte 0xff)"},
		{"runq:\n  é\x01", "f:2:4: control character 0x01"},
		{"runq:\n\tevery: 1s\n", "f:2:1: a tab cannot indent YAML; use spaces"},
		{"runq: {every: *e}", "f:1:15: alias *e: no anchor &e before it"},
		{"runq: {<<: {}}", "f:1:8: runq: merge keys (<<) are not supported; write the keys out"},
		{"runq: {[a]: 1}", "f:1:8: runq: want a name as key, got a list"},
		{"runq: {~: 1}", "f:1:8: runq: want a name as key, got nothing"},
		{"runq: !mine {}", "f:1:7: runq: the tag !mine is not supported: remove it, or quote a text that begins with !"},
		{"runq: {enabled: yes}", `f:1:17: runq.enabled: want true or false, got "yes"; did you mean "true"?`},
		{"runq: {enabled: 'true'}", `f:1:17: runq.enabled: want true or false, got the text "true"; remove the quotes`},
		{"runq: {enabled: 7}", "f:1:17: runq.enabled: want true or false, got 7"},
		{"runq: {every: 30}", `f:1:15: runq.every: want a duration like 30s or 5m, got 30; did you mean "30s"?`},
		{"runq: {every: 0}", `f:1:15: runq.every: want a duration like 30s or 5m, got 0; did you mean "0s"?`},
		{"runq: {every: soon}", `f:1:15: runq.every: want a duration like 30s or 5m, got "soon"`},
		{"runq: {limit: 20k}", `f:1:15: runq.limit: rate "20k" has no unit; did you mean "20kpps"?`},
		{"runq: {limit: [1]}", "f:1:15: runq.limit: a rate is no list"},
		{"runq: {limit: {packets: x}}", `f:1:25: runq.limit.packets: want a whole number, got "x"`},
		{"runq: {limit: ~}", "f:1:15: runq.limit: want a value, got nothing; give one, or remove the key"},
		{"runq:", "f:1:6: runq: want " + mapping + ", got nothing; write {} for an empty one, or remove the key"},
		{"services: {a: {listen: }}", "f:1:24: services.a.listen: want a list, got nothing; write [] for an empty one, or remove the key"},
		{"services: {a: {listen: udp x}}", `f:1:24: services.a.listen: want a list, got "udp x"; did you mean "[udp x]"?`},
		{"services: {a: {listen: [x]}}", `f:1:25: services.a.listen[0]: want PROTOCOL ADDRESS:PORT, like "udp 0.0.0.0:4739"`},
		{"services: {a: {listen: ['']}}", `f:1:25: services.a.listen[0]: want a value, got ""`},
		{"services: {a: {prefix: ''}}", `f:1:24: services.a.prefix: want a prefix like 192.0.2.0/24, got ""`},
		{"services: {a: {prefix: 192.0.2.1}}", `f:1:24: services.a.prefix: want a prefix like 192.0.2.0/24, got "192.0.2.1"; did you mean "192.0.2.1/32"?`},
		{"services: {a: {peer: {}}}", "f:1:22: services.a.peer: want an address like 192.0.2.1, got a mapping"},
		{"services: {a: {netns: [x]}}", "f:1:23: services.a.netns: want text, got a list"},
		{"services: {a: {hidden: 1}}", `f:1:16: services.a: unknown key "hidden"; known here: listen, netns, peer, prefix, steer, targets`},
		{"services: {'a b': 1}", `f:1:19: services."a b": want ` + mapping + `, got 1`},
		{"services: {a: {steer: {slotz: 4}}}", `f:1:24: services.a.steer: unknown key "slotz"; did you mean "slots"?`},
		{"services: {a: {steer: {on-empty: x}}}", `f:1:24: services.a.steer: unknown key "on-empty"; did you mean "on_empty"?`},
		{"services: {a: {steer: {slots: four}}}", `f:1:31: services.a.steer.slots: want a whole number, got "four"`},
		{"services: {a: {steer: {slots: 1.5}}}", "f:1:31: services.a.steer.slots: want a whole number, got 1.5"},
		{"services: {a: {steer: {slots: 010}}}", "f:1:31: services.a.steer.slots: want a whole number, got 010"},
		{"services: {a: {steer: {slots: '4'}}}", `f:1:31: services.a.steer.slots: want a whole number, got the text "4"; remove the quotes`},
		{"services: {a: {steer: {slots: 9223372036854775808}}}",
			"f:1:31: services.a.steer.slots: want a whole number from -9223372036854775808 to 9223372036854775807, got 9223372036854775808"},
		{"services: {a: {steer: {seed: -1}}}", "f:1:30: services.a.steer.seed: want a whole number from 0 to 4294967295, got -1"},
		{"services: {a: {steer: {seed: ~}}}", "f:1:30: services.a.steer.seed: want a whole number, got nothing; give one, or remove the key"},
		{"services: {a: {steer: {weights: [1, 256]}}}", "f:1:37: services.a.steer.weights[1]: want a whole number from 0 to 255, got 256"},
		{"services: {a: {steer: {share: .inf}}}", "f:1:31: services.a.steer.share: want a number, got .inf"},
		{"services: {a: {steer: {share: 1e999}}}", "f:1:31: services.a.steer.share: want a number within its range, got 1e999"},
		{"services: {a: {steer: {slots: 4, by: x, slots: 5}}}", `f:1:41: services.a.steer: duplicate key "slots"; first in line 1`},
		{"services: {a: {steer: {members: [{slot: 0, Unit: x}]}}}", `f:1:44: services.a.steer.members[0]: unknown key "Unit"; did you mean "unit"?`},
		{"services: {a: {steer: {members: [{skipped: x}]}}}", `f:1:35: services.a.steer.members[0]: unknown key "skipped"; known here: slot, unit`},
	} {
		err := strictyaml.Decode("f", []byte(c.in), &host{})
		if err == nil || err.Error() != c.want {
			t.Errorf("%s\ngot  %v\nwant %s", c.in, err, c.want)
		}
	}
}

func TestErrorValues(t *testing.T) {
	err := strictyaml.Decode("f", []byte("services: {a: {listen: [x]}, b: {stear: {}}}"), &host{})
	if !errors.Is(err, errListen) {
		t.Errorf("%v does not wrap the cause", err)
	}
	list := strictyaml.Errors(err)
	if len(list) != 2 {
		t.Fatalf("%d errors in %v, want 2", len(list), err)
	}
	want := strictyaml.Error{File: "f", Line: 1, Column: 34, Path: "services.b", Msg: `unknown key "stear"`, Suggestion: "steer"}
	if *list[1] != want {
		t.Errorf("got %+v, want %+v", *list[1], want)
	}
}

func TestFiles(t *testing.T) {
	var c struct {
		A string            `yaml:"a" path:"file"`
		B map[string]string `yaml:"b" path:"file"`
		C *struct {
			D string `yaml:"d" path:"file"`
		} `yaml:"c"`
		E string `yaml:"e" path:"file"`
		F string `yaml:"f"`
		G string `yaml:"g" path:"credential"`
		H string `yaml:"h" path:"credential"`
	}
	if err := strictyaml.Decode("/etc/weir/weir.yaml", []byte("{a: x, b: {k: ../y, l: /z}, c: {d: '@w'}, f: v, g: 'credential:n', h: x}"), &c); err != nil {
		t.Fatal(err)
	}
	got := []string{c.A, c.B["k"], c.B["l"], c.C.D, c.E, c.F, c.G, c.H}
	if want := []string{"/etc/weir/x", "/etc/y", "/z", "@w", "", "v", "credential:n", "/etc/weir/x"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if err := strictyaml.Decode("x.yaml", []byte("{a: [1]}"), &c); err == nil {
		t.Error("a list for the name of a file is taken")
	}
}

func TestPosErrorf(t *testing.T) {
	cause := errors.New("taken")
	err := strictyaml.Pos{File: "weir.yaml", Line: 12, Column: 9}.Errorf("slot %d: %w", 3, cause)
	if got, want := err.Error(), "weir.yaml:12:9: slot 3: taken"; got != want || !errors.Is(err, cause) {
		t.Errorf("got %q, want %q wrapping its cause", got, want)
	}
	if got := (strictyaml.Pos{}).Errorf("no file").Error(); got != "no file" {
		t.Errorf("without a place: %q", got)
	}
	if n := len(strictyaml.Errors(errors.Join(err, errors.Join(err, nil)))); n != 2 {
		t.Errorf("%d errors in a nested join, want 2", n)
	}
}

// cpuTime returns the CPU time of this process, so a stalled machine does not count as a slow
// parser.
func cpuTime(t *testing.T) time.Duration {
	t.Helper()
	var r unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &r); err != nil {
		t.Fatal(err)
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// TestBillionLaughs checks that a kilobyte expanding to a billion values fails soon, with an error.
func TestBillionLaughs(t *testing.T) {
	var b strings.Builder
	b.WriteString("a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n")
	for i := 1; i < 10; i++ {
		fmt.Fprintf(&b, "a%d: &a%d [%s*a%d]\n", i, i, strings.Repeat(fmt.Sprintf("*a%d, ", i-1), 9), i-1)
	}
	var into map[string]tree
	start := cpuTime(t)
	err := strictyaml.Decode("f", []byte(b.String()), &into)
	if err == nil || !strings.Contains(err.Error(), "aliases expand to more than 100000 values") {
		t.Errorf("got %v", err)
	}
	if d := cpuTime(t) - start; d > 10*time.Second {
		t.Errorf("took %v of a CPU", d)
	}
}

func TestCyclicAlias(t *testing.T) {
	var into map[string]tree
	err := strictyaml.Decode("f", []byte("a: &a [1, *a]\nb: *a\n"), &into)
	if want := "f:1:11: a[1][1]: the anchor &a contains itself"; err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("got %v, want %s", err, want)
	}
}

// TestAliasesOfUnknownKeys uses 92 KB of aliases to a mapping of unknown keys. They previously cost
// 1.3 GB and 20 s.
func TestAliasesOfUnknownKeys(t *testing.T) {
	var b strings.Builder
	b.WriteString("x: &x {")
	for i := range 8000 {
		fmt.Fprintf(&b, "k%d: 1, ", i)
	}
	b.WriteString("}\nall: {")
	for i := range 1200 {
		fmt.Fprintf(&b, "a%d: *x, ", i)
	}
	b.WriteString("}\n")
	for i := range 1200 {
		fmt.Fprintf(&b, "s%d: *x\n", i)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	var into map[string]host
	err := strictyaml.Decode("f", []byte(b.String()), &into)
	runtime.ReadMemStats(&after)
	if took := after.TotalAlloc - before.TotalAlloc; err == nil || took > 100<<20 {
		t.Errorf("%d MB for %.200v", took>>20, err)
	}
}

// tree is a list of trees or a number, of any depth.
type tree struct{ list []tree }

func (tr *tree) UnmarshalNode(n *yaml.Node, d *strictyaml.Decoder) error {
	if n.Kind == yaml.SequenceNode {
		return d.Decode(n, &tr.list)
	}
	return nil
}

func TestManyErrors(t *testing.T) {
	var b strings.Builder
	for i := range 1000 {
		fmt.Fprintf(&b, "key%d: 1\n", i)
	}
	list := strictyaml.Errors(strictyaml.Decode("f", []byte(b.String()), &host{}))
	if len(list) != 201 || !strings.Contains(list[200].Error(), "f:201:1: more than 200 errors") {
		t.Errorf("%d errors, the last %v", len(list), list[len(list)-1])
	}
}

func FuzzDecode(f *testing.F) {
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	for _, s := range []string{"", "a: &a [*a]", "? {a: b}\n: c", "<<: *x", "---\n---\n", "runq: !!binary x", "services: {a: {listen: [udp x]}}", "\ufeffrunq: {}"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		// An endless parser would otherwise only show as a stalled fuzzer.
		late := time.AfterFunc(60*time.Second, func() { panic(fmt.Sprintf("still decoding after 60 s: %q", data)) })
		err := strictyaml.Decode("f", data, &host{})
		late.Stop()
		if err == nil {
			return
		}
		list := strictyaml.Errors(err)
		if len(list) == 0 {
			t.Fatalf("an error without a place: %v", err)
		}
		lines := strings.Count(string(data), "\n") + strings.Count(string(data), "\r") +
			strings.Count(string(data), "\u0085") + strings.Count(string(data), "\u2028") + strings.Count(string(data), "\u2029") + 1
		last := 0
		for _, e := range list {
			if e.Line < max(last, 1) || e.Line > lines+1 || e.Column < 1 || e.Msg == "" {
				t.Fatalf("of %d lines, after line %d: %#v", lines, last, e)
			}
			last = e.Line
		}
	})
}

// TestErrorsAtKeys checks that an error of a value is at the value, not at the surrounding mapping.
func TestErrorsAtKeys(t *testing.T) {
	var h host
	text := "services:\n  a:\n    steer:\n      by: flow\n      slots: 3\n      weights:\n        - 1\n      members: [{slot: 1}]\nrunq:\n  every: 3s\n  limit:\n    packets: 5\n    bytes: 7\n"
	if err := strictyaml.Decode("f", []byte(text), &h); err != nil {
		t.Fatal(err)
	}
	s := h.Services["a"].Steer
	for _, c := range []struct {
		at   strictyaml.Pos
		msg  string
		want string
	}{
		{s.Pos, "slots 3: take 4", "f:5:14: "},
		{s.Pos, "services.a.steer: slots 3: take 4", "f:5:14: "},
		{s.Pos, "weights: too few", "f:6:7: "},
		{s.Pos, "services.a.steer: slots 3: by flow: takes no slots", "f:4:11: "},
		{s.Pos, "no slots: say how many", "f:4:7: "},
		{s.Pos, "seed: want one", "f:4:7: "},
		{s.Members[0].Pos, "slot 1: the service has 1", "f:8:24: "},
		{h.Pos, "runq: every 3s: take 5s", "f:10:10: "},
		{h.Pos, "runq: limit: packets 5: by default", "f:11:3: "},
		{strictyaml.Pos{}, "slots 3: take 4", "slots 3"},
	} {
		if got := c.at.Errorf("%s", c.msg).Error(); !strings.HasPrefix(got, c.want) {
			t.Errorf("%q: got %q, want it at %s", c.msg, got, c.want)
		}
	}
}

// extended is a mapping with keys beside its fields.
type extended struct {
	Name  string         `yaml:"name" former:"title"`
	Parts map[string]any `yaml:"-"`
}

func (e *extended) Keys() []string { return []string{"limits", "files"} }

func (e *extended) Section(key string) any {
	if e.Parts == nil {
		e.Parts = map[string]any{}
	}
	switch key {
	case "limits":
		e.Parts[key] = &struct {
			Max int `yaml:"max"`
		}{}
	case "files":
		e.Parts[key] = &[]string{}
	}
	return e.Parts[key]
}

func TestExtended(t *testing.T) {
	var e extended
	if err := strictyaml.Decode("f", []byte("name: a\nlimits: {max: 3}\n"), &e); err != nil {
		t.Fatal(err)
	}
	if m := e.Parts["limits"].(*struct {
		Max int `yaml:"max"`
	}).Max; m != 3 || len(e.Parts) != 1 {
		t.Errorf("decoded %+v", e.Parts)
	}
	for text, want := range map[string]string{
		"limits: {maxx: 3}\n": `f:1:10: limits: unknown key "maxx"; did you mean "max"?`,
		"limit: {max: 3}\n":   `f:1:1: unknown key "limit"; did you mean "limits"?`,
		"limits: {max: x}\n":  `f:1:15: limits.max: want a whole number, got "x"`,
		"x: 1\n":              `f:1:1: unknown key "x"; known here: files, limits, name`,
		"title: a\n":          `f:1:1: unknown key "title"; it is "name" now`,
	} {
		if err := strictyaml.Decode("f", []byte(text), &extended{}); err == nil || err.Error() != want {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}
