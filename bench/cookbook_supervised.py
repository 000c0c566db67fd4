"""Run the cookbook's supervised training on the conversations that it ships; the cookbook must be installed.

    python bench/cookbook_supervised.py MODEL URL LOG_FOLDER
"""

import asyncio
import sys
from pathlib import Path

import tinker_cookbook
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig


def main(model: str, url: str, folder: str) -> None:
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name="role_colon", max_length=200, batch_size=4,
        train_on_what=TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    conversations = Path(tinker_cookbook.__file__).parent / "example_data" / "conversations.jsonl"
    asyncio.run(train.main(train.Config(
        log_path=folder, model_name=model, recipe_name="supervised", renderer_name="role_colon",
        dataset_builder=FromConversationFileBuilder(common_config=common, file_path=str(conversations)),
        learning_rate=1e-3, num_epochs=1, eval_every=0, base_url=url, max_steps=4)))


if __name__ == "__main__":
    main(*sys.argv[1:])
