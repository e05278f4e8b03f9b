// SPDX-License-Identifier: Apache-2.0

package rig

import (
	"fmt"
	"testing"

	"github.com/weir-project/weir/feature/steer"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/host"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/peers"
)

func collectors(n int) (all []*peers.Collector) {
	for i := range n {
		all = append(all, &peers.Collector{Number: i, PIDFile: fmt.Sprintf("/run/c%d.pid", i)})
	}
	return all
}

// weir accepts the lab's configuration. It has a slot for every collector except the spare ones.
func TestConfiguration(t *testing.T) {
	w := &Weir{env: &lab.Env{Seed: 7}, namespace: "collectors"}
	w.Add(&Service{Name: "v6", Listen: []string{"udp6 [::]:9992", "tcp6 [::]:9992"}, Engine: "sk_lookup", Collectors: collectors(5)},
		&Service{Name: "both", Listen: []string{"udp :9991", "tcp :9991"}, Collectors: collectors(3)})
	for _, spare := range []int{1, 0, 2} {
		w.services[0].Spare(spare)
		c, err := host.ParseConfig("weir.yaml", w.yaml())
		if err != nil {
			t.Fatalf("%v\n%s", err, w.yaml())
		}
		cs, _ := steer.Feature{}.Spec(c.Document())
		if len(cs.Services) != 2 {
			t.Fatalf("%d services:\n%s", len(cs.Services), w.yaml())
		}
		both, v6 := cs.Services[0], cs.Services[1]
		if v6.Slots != 5-spare || len(v6.Members) != 5-spare || both.Slots != 3 || len(both.Members) != 3 {
			t.Errorf("%d spare:\n%s", spare, w.yaml())
		}
		if v6.Engine != spec.EngineSkLookup || *v6.Seed != 7 || len(v6.Endpoints()) != 2 || len(both.Endpoints()) != 4 {
			t.Errorf("engine %s, seed %d, endpoints %v and %v", v6.Engine, *v6.Seed, v6.Endpoints(), both.Endpoints())
		}
	}
}

// oneOfEachBucket covers every bucket, for any seed.
func TestOneOfEachBucket(t *testing.T) {
	for _, seed := range []uint32{0, 1, 0xffffffff} {
		seen := map[int]bool{}
		for _, a := range oneOfEachBucket(seed) {
			seen[spec.Bucket(seed, a)] = true
		}
		if len(seen) != spec.Buckets {
			t.Errorf("seed %d: %d of %d buckets", seed, len(seen), spec.Buckets)
		}
	}
}
