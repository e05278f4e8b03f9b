// SPDX-License-Identifier: Apache-2.0

package bigjson

import (
	"bytes"
	"encoding/json"
	"reflect"
	"runtime"
	"strings"
	"testing"
)

func read(text string) (*Object, error) {
	return Read(strings.NewReader(text), int64(len(text)))
}

// all returns all members of an object by Get.
func (o *Object) all(t testing.TB) map[string]json.RawMessage {
	t.Helper()
	out := map[string]json.RawMessage{}
	for _, m := range o.members {
		text, err := o.Get(m.name)
		if err != nil {
			t.Fatal(err)
		}
		out[m.name] = text
	}
	return out
}

func TestRead(t *testing.T) {
	for _, text := range []string{`{}`, " {\n} ", `{"a":1}`, `{"a":"}\"],","b":[{"c":[]},2],"é\"":null}`, ` { "a" : { "b" : 1 } , "c" : "\\" } `} {
		var want map[string]any
		if err := json.Unmarshal([]byte(text), &want); err != nil {
			t.Fatal(err)
		}
		o, err := read(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		got := map[string]any{}
		for name, value := range o.all(t) {
			var v any
			if err := json.Unmarshal(value, &v); err != nil {
				t.Errorf("%s: %s: %v", text, name, err)
			}
			got[name] = v
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: got %v", text, got)
		}
	}
	for _, text := range []string{``, `[]`, `null`, `{`, `{"a"`, `{"a":`, `{"a":1`, `{"a":1,}`, `{"a" 1}`, `{a:1}`, `{"a":1]`, `{"a":"}`, `{"a":1} x`, `{"a":1,"a":2}`, `{"` + strings.Repeat("n", 300) + `":1}`} {
		if o, err := read(text); err == nil {
			t.Errorf("%s: no error, %v", text, o.members)
		}
	}
}

func TestWithout(t *testing.T) {
	o, err := read(`{"a":[1],"b":{"c":2},"d":"x"}`)
	if err != nil {
		t.Fatal(err)
	}
	for want, names := range map[string][]string{`{"a":[1],"d":"x"}`: {"b", "none"}, `{}`: {"a", "b", "d"}, `{"b":{"c":2},"d":"x"}`: {"a"}} {
		no := map[string]bool{}
		for _, n := range names {
			no[n] = true
		}
		var b bytes.Buffer
		if err := o.Without(&b, no); err != nil || b.String() != want {
			t.Errorf("without %q: %s, %v", names, b.String(), err)
		}
	}
}

func TestCheck(t *testing.T) {
	for text, ok := range map[string]bool{
		`[null` + strings.Repeat(",null", MaxParts-2) + `]`:     true,
		`[null` + strings.Repeat(",null", MaxParts-1) + `]`:     false,
		`[{}` + strings.Repeat(",{}", MaxParts) + `]`:           false,
		`{"a":""` + strings.Repeat(`,"a":""`, MaxParts) + `}`:   false,
		`[""` + strings.Repeat(`,"null,{"`, MaxStrings-1) + `]`: true,
		`[""` + strings.Repeat(`,""`, MaxStrings) + `]`:         false,
		`["` + strings.Repeat(`{\"`, 4*MaxParts) + `"]`:         true,
	} {
		if err := Check([]byte(text)); (err == nil) != ok {
			t.Errorf("%.20s…: %v", text, err)
		}
	}
}

// Members that nobody asks for cost no memory.
func TestReadInConstantMemory(t *testing.T) {
	text := []byte(`{"big":["` + strings.Repeat("a", 64<<20) + `"],"small":1}`)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	o, err := Read(bytes.NewReader(text), int64(len(text)))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := o.Get("small"); err != nil || string(got) != "1" {
		t.Errorf("got %q, %v", got, err)
	}
	n := counter(0)
	if err := o.Without(&n, map[string]bool{"small": true}); err != nil || int(n) < 64<<20 {
		t.Errorf("copied %d bytes, %v", n, err)
	}
	runtime.ReadMemStats(&after)
	if used := after.TotalAlloc - before.TotalAlloc; used > 1<<20 {
		t.Errorf("allocated %d bytes for a member that nobody read", used)
	}
}

type counter int

func (c *counter) Write(b []byte) (int, error) { *c += counter(len(b)); return len(b), nil }

// Every object that encoding/json accepts has the same members here.
func FuzzRead(f *testing.F) {
	for _, s := range []string{`{}`, `{"a":1}`, `{"a":"}\"],","b":[{"c":[]},2]}`, `{"a":{"a":1}} `, `{"\u0061":[`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		o, err := read(text)
		var want map[string]json.RawMessage
		if json.Unmarshal([]byte(text), &want) != nil || want == nil {
			return
		}
		if err != nil {
			if len(want) < maxMembers && !strings.Contains(err.Error(), "twice") && !strings.Contains(err.Error(), "too long") {
				t.Fatalf("%q: %v", text, err)
			}
			return
		}
		for name, value := range o.all(t) {
			if !bytes.Equal(value, want[name]) {
				t.Fatalf("%q: member %q is %q, want %q", text, name, value, want[name])
			}
		}
		if len(want) != len(o.members) {
			t.Fatalf("%q: %d members, want %d", text, len(o.members), len(want))
		}
	})
}
