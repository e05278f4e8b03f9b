// SPDX-License-Identifier: Apache-2.0

package feature_test

import (
	"context"
	"fmt"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// An item of the feature's section in weir.yaml, and the item as shown by weir status.
type (
	item struct {
		Name string `yaml:"name" json:"name"`
	}
	view struct {
		Name string `json:"name" table:"NAME" label:"name"`
	}
)

// A feature of independent instances is a Set: it reconciles one item with the kernel, and reads one instance. Plans,
// upgrades, removal, tables and metrics follow. Package featuretest has a complete one, with a program.
func ExampleSet() {
	counters := feature.Set[item, view]{
		Store:   instances.Store[item]{Feature: "counter", ABI: 1},
		NameOf:  func(i item) string { return i.Name },
		NeedsOf: func([]item) []kernel.Need { return nil },
		View:    func(_ *kernel.Root, rec instances.Record[item]) (view, error) { return view{rec.Name}, nil },
	}
	counters.Reconcile = func(l *kernel.WriteLock, i kernel.Instance, ns *netns.Handle, it item) error {
		return counters.Store.Publish(l, i, instances.Form[item]{Spec: it, Netns: ns})
	}
	plan, err := counters.Plan(context.Background(), feature.SetState[item, view]{}, []item{{"web"}, {"dns"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, step := range plan.Steps { // step.Do calls Reconcile under the lock
		fmt.Println(step.Verb, step.Object)
	}
	// Output:
	// create counter web
	// create counter dns
}
